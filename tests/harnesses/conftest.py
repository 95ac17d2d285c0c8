"""The real gateway on a port of its own, a scripted engine behind it, and real local sandboxes."""

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.doubles.scripted_engine import ScriptedEngine
from tests.gateway.conftest import Served
from tests.harnesses.world import ADMIN_KEY, CONTEXT_LENGTH, World
from tests.templates.models import write_model_dir
from titogym.envs.sandboxes.local import LocalBackend
from titogym.gateway.app import create_app
from titogym.gateway.client import GatewayClient
from titogym.gateway.settings import GatewaySettings
from titogym.templates.families import BUILT_IN
from titogym.templates.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = next(family for family in BUILT_IN if family.name == "quickstart")
    return write_model_dir(tmp_path_factory.mktemp("models") / "tiny", family, context_length=CONTEXT_LENGTH)


@pytest.fixture(scope="session")
def engine(model_dir: Path) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(
        lambda prompt, params: "",
        tokenizer=Tokenizer.load(model_dir),
        context_length=CONTEXT_LENGTH,
        model_path=str(model_dir),
    ) as engine:
        yield engine


@pytest.fixture(scope="session")
def gateway_url(engine: ScriptedEngine, model_dir: Path) -> Iterator[str]:
    served = Served(
        create_app(GatewaySettings(model_dir=model_dir, engines=(engine.url,), admin_key=ADMIN_KEY))
    )
    yield served.url
    served.stop()


@pytest.fixture
def sandboxes() -> Iterator[Path]:
    """Where sandboxes live: a directory that their users may enter."""
    root = Path(tempfile.mkdtemp(prefix="titogym-test-"))
    root.chmod(0o755)
    yield root
    shutil.rmtree(root)


@pytest.fixture
async def world(engine: ScriptedEngine, gateway_url: str, sandboxes: Path) -> AsyncIterator[World]:
    """All that an episode needs; afterwards nothing may be left of any."""
    engine.faults.clear()
    engine.requests.clear()
    engine.token_latency = 0.0
    async with GatewayClient(gateway_url, ADMIN_KEY) as gateway:
        world = World(engine, gateway, LocalBackend(sandboxes), os.getpid())
        yield world
        await world.assert_nothing_left()
