"""The real gateway in a process of its own, a scripted engine behind it, and real local sandboxes."""

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.doubles.scripted_engine import ScriptedEngine
from tests.harnesses.world import CONTEXT_LENGTH, World
from tests.templates.models import write_model_dir
from titogym.envs.sandboxes.local import LocalBackend
from titogym.gateway.client import GatewayClient
from titogym.gateway.launch import GatewayProcess, launch
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
def gateway_process(
    engine: ScriptedEngine, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    process = launch([engine.url], model_dir, directory=tmp_path_factory.mktemp("gateway"))
    yield process
    process.stop()


@pytest.fixture
def sandboxes() -> Iterator[Path]:
    """Where sandboxes live: a directory that their users may enter."""
    root = Path(tempfile.mkdtemp(prefix="titogym-test-"))
    root.chmod(0o755)
    yield root
    shutil.rmtree(root)


@pytest.fixture
async def world(
    engine: ScriptedEngine, gateway_process: GatewayProcess, sandboxes: Path
) -> AsyncIterator[World]:
    """All that an episode needs; afterwards nothing may be left of any."""
    engine.faults.clear()
    engine.requests.clear()
    engine.token_latency = 0.0
    async with GatewayClient(gateway_process.url, gateway_process.admin_key) as gateway:
        world = World(engine, gateway, LocalBackend(sandboxes), os.getpid())
        yield world
        try:
            await world.assert_nothing_left()
        finally:
            for session in await gateway.sessions():
                await gateway.delete(session["id"])
