"""An unmodified agent program on the real engine: what it trained on is what SGLang was sent and returned."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.doubles.recording_proxy import RecordingProxy
from tests.e2e.test_token_exactness import _check_masks, _prefixes
from tests.gateway.conftest import Served
from titogym.envs.sandboxes.local import LocalBackend
from titogym.envs.task import Limits, Task
from titogym.gateway.app import create_app
from titogym.gateway.client import GatewayClient
from titogym.gateway.engines.launch import EngineProcess
from titogym.gateway.settings import GatewaySettings
from titogym.harnesses.episode import EpisodeResult, run_episode
from titogym.harnesses.registry import harness

pytestmark = [pytest.mark.engine, pytest.mark.sandbox, pytest.mark.timeout(900)]

KEY = "a-key-for-this-test"
TURNS = 4


@dataclass
class Stand:
    url: str
    witness: RecordingProxy
    sandboxes: Path


@pytest.fixture
def stand(sglang_server: EngineProcess, tiny_model: Path) -> Iterator[Stand]:
    witness = RecordingProxy(sglang_server.url)
    proxy = Served(witness.app)
    engine = f"http://127.0.0.1:{proxy.port}"
    settings = GatewaySettings(engines=(engine,), model_dir=tiny_model, family="qwen3", admin_key=KEY)
    gateway = Served(create_app(settings))
    sandboxes = Path(tempfile.mkdtemp(prefix="titogym-test-"))
    sandboxes.chmod(0o755)
    yield Stand(f"http://127.0.0.1:{gateway.port}", witness, sandboxes)
    gateway.stop()
    proxy.stop()
    shutil.rmtree(sandboxes)


async def _work(stand: Stand) -> EpisodeResult:
    agent = harness("inspect_ai", system="Use bash.")
    task = Task(
        id="any",
        instruction="Do it.",
        tests={"test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"},
        limits=Limits(turns=TURNS, agent_seconds=300.0),
    )
    async with GatewayClient(stand.url, KEY) as gateway:
        return await run_episode(
            task,
            harness=agent,
            backend=LocalBackend(stand.sandboxes),
            gateway=gateway,
            session_options={"sampling": {"max_tokens": 24, "temperature": 1.0}},
        )


def test_an_agent_program_trains_on_what_the_engine_was_sent_and_returned(stand: Stand) -> None:
    """The model is a random one; the program asks it to go on until the budget of turns is used up."""
    result = asyncio.run(_work(stand))
    exchanges = stand.witness.exchanges
    assert result.turns == len(exchanges) >= 2, result
    assert result.outcome in ("turn_limit", "finished", "crashed"), result.error
    assert result.reward == 1.0
    (trajectory,) = result.trajectories
    assert trajectory.turns == len(exchanges)
    rows = _prefixes(trajectory, {(*one.input_ids, *one.output_ids): one for one in exchanges})
    assert len(rows) == len(exchanges)
    _check_masks(trajectory, rows)
