"""One episode: what it gives, how failures are told apart, and that no way out leaves anything."""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.doubles.scripted_engine import Fault, ScriptedEngine
from tests.harnesses.world import PASS_IF_DONE, World, call, processes, say, task
from titogym.envs.sandboxes.base import Mount, Sandbox, SandboxError, SandboxSpec
from titogym.envs.sandboxes.local import LocalBackend, LocalSandbox
from titogym.envs.task import Task
from titogym.errors import UserError
from titogym.gateway.client import GatewayClient
from titogym.gateway.launch import GatewayProcess, launch
from titogym.harnesses.base import Connection, HarnessResult
from titogym.harnesses.episode import EpisodeResult, run_episode
from titogym.harnesses.openai_loop import OpenAILoop
from titogym.harnesses.warm import WarmStarts
from titogym.templates.tokenizer import Tokenizer

pytestmark = pytest.mark.sandbox


@dataclass
class Agent:
    """A harness whose agent is a function."""

    work: Callable[[Sandbox, Connection], Awaitable[HarnessResult]]
    name: str = "agent"
    matcher: str = "strict"
    inside: bool = False

    async def prepare(self) -> None: ...

    def mounts(self) -> tuple[Mount, ...]:
        return ()

    async def run(self, task: Task, sandbox: Sandbox, connection: Connection) -> HarnessResult:
        return await self.work(sandbox, connection)

    async def close(self) -> None: ...


async def idle(sandbox: Sandbox, connection: Connection) -> HarnessResult:
    return HarnessResult("finished")


async def hang(sandbox: Sandbox, connection: Connection) -> HarnessResult:
    await sandbox.exec("sleep 1000")
    raise AssertionError("the sandbox's command cannot end")


@pytest.mark.parametrize(
    ("test", "sentence"),
    [
        ("true", "wrote neither"),
        ("echo nan > /logs/verifier/reward.txt", "finite"),
        ("echo 1.5 > /logs/verifier/reward.txt", "within [0, 1]"),
        ("echo much > /logs/verifier/reward.txt", "not a number"),
        ("sleep 100", "did not end within 0.5 s"),
    ],
)
async def test_no_valid_reward_is_an_error_and_never_a_number(world: World, test: str, sentence: str) -> None:
    world.script(say("done"))
    result = await world.run(task(test, verifier_seconds=0.5 if "sleep" in test else 20.0), OpenAILoop())
    assert (result.outcome, result.reward) == ("grading_error", None)
    assert sentence in (result.error or "")
    assert (result.error or "").count(".") >= 1
    assert "\n" not in (result.error or "")
    (trajectory,) = result.trajectories
    assert trajectory.reward is None
    assert not result.usable


async def test_a_task_without_tests_is_an_error_of_the_episode(world: World) -> None:
    world.script(say("done"))
    result = await world.run(replace(task(), tests=None), OpenAILoop())
    assert (result.outcome, result.reward) == ("grading_error", None)
    assert "has no tests" in (result.error or "")


async def test_a_harness_that_crashes_still_gives_its_samples_and_a_grade(world: World) -> None:
    world.script(call("touch done"), say("done"))

    async def crash(sandbox: Sandbox, connection: Connection) -> HarnessResult:
        await OpenAILoop().run(task(), sandbox, connection)
        raise RuntimeError("out of ideas")

    result = await world.run(task(PASS_IF_DONE), Agent(crash))
    assert (result.outcome, result.reward, result.turns) == ("crashed", 1.0, 2)
    assert "out of ideas" in (result.error or "")
    assert len(result.trajectories) == 1
    assert not result.usable


async def test_a_harness_that_ignores_its_limit_is_stopped(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titogym.harnesses.episode.HARNESS_GRACE", 0.2)
    result = await world.run(task(agent_seconds=0.3), Agent(hang))
    assert (result.outcome, result.reward) == ("timeout", 1.0)
    assert result.seconds["agent"] < 3


async def test_an_agent_that_kills_its_sandbox_harms_only_itself(world: World) -> None:
    world.script(call("touch done; kill -9 -1; kill -9 1; sleep 1"), say("done"))
    result = await world.run(task(PASS_IF_DONE), OpenAILoop())
    assert result.reward == 1.0
    assert result.turns == 2


async def test_background_processes_do_not_see_the_grading(world: World) -> None:
    world.script(call("touch done; setsid sh -c 'while :; do rm -f /workspace/done; done' &"), say("done"))
    result = await world.run(task("touch /workspace/done; sleep 0.2; " + PASS_IF_DONE), OpenAILoop())
    assert result.reward == 1.0


async def test_the_time_to_make_a_sandbox_is_not_the_agents(world: World) -> None:
    world.script(call("touch done"), say("done"))
    slow = SlowBackend(world.backend.root, seconds=1.5)
    result = await run_episode(
        task(PASS_IF_DONE, agent_seconds=1.4), harness=OpenAILoop(), backend=slow, gateway=world.gateway
    )
    assert (result.outcome, result.reward) == ("finished", 1.0)
    assert result.seconds["setup"] >= 1.5


class SlowBackend(LocalBackend):
    def __init__(self, root: Path, seconds: float) -> None:
        super().__init__(root)
        self._seconds = seconds

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        sandbox = await super().create(spec)
        await asyncio.sleep(self._seconds)
        return sandbox


class BrokenBackend(LocalBackend):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        raise self._error


@pytest.mark.parametrize(
    "error", [SandboxError("no room left"), UserError("no room left"), RuntimeError("no room left")]
)
async def test_a_sandbox_that_cannot_be_made_fails_the_episode(world: World, error: Exception) -> None:
    result = await run_episode(
        task(), harness=OpenAILoop(), backend=BrokenBackend(error), gateway=world.gateway
    )
    assert (result.outcome, result.reward) == ("setup_error", None)
    assert "no room left" in (result.error or "")


@pytest.mark.parametrize(
    ("options", "outcome", "sentence"),
    [({"matcher": "vague"}, "gateway_error", "vague"), ({"ttl": 3}, "gateway_error", "ttl")],
)
async def test_a_session_that_is_refused_fails_the_episode(
    world: World, options: dict[str, object], outcome: str, sentence: str
) -> None:
    result = await world.run(task(), OpenAILoop(), session_options=options)
    assert (result.outcome, result.session_id) == (outcome, None)
    assert sentence in (result.error or "")


async def test_an_unknown_environment_fails_the_episode(world: World) -> None:
    result = await world.run(replace(task(), environment="moon"), OpenAILoop())
    assert result.outcome == "setup_error"
    assert "moon" in (result.error or "")


async def test_a_gateway_that_is_not_there_fails_the_episode(world: World) -> None:
    async with GatewayClient("http://127.0.0.1:1") as nowhere:
        result = await run_episode(task(), harness=OpenAILoop(), backend=world.backend, gateway=nowhere)
    assert result.outcome == "gateway_error"
    assert "does not answer" in (result.error or "")


async def test_a_session_can_be_kept_and_carries_the_labels(world: World) -> None:
    world.script(say("done"))
    result = await world.run(task(), OpenAILoop(), labels={"attempt": "3"}, keep_session=True)
    (listed,) = await world.gateway.sessions()
    assert listed["id"] == result.session_id
    assert listed["labels"] == {"task": "sample", "attempt": "3"}
    await world.gateway.delete(listed["id"])


# --- leaving nothing --------------------------------------------------------------------------------


async def spawn_daemons(sandbox: Sandbox, connection: Connection) -> HarnessResult:
    await sandbox.exec("for i in 1 2 3; do setsid sleep 1000 >/dev/null 2>&1 & done")
    return HarnessResult("finished")


async def fail(sandbox: Sandbox, connection: Connection) -> HarnessResult:
    await sandbox.exec("sleep 1000 &")
    raise OSError("gone")


async def destroy(sandbox: Sandbox, connection: Connection) -> HarnessResult:
    await sandbox.destroy()
    return HarnessResult("finished")


WAYS: dict[str, Callable[[], Agent | OpenAILoop]] = {
    "loop": OpenAILoop,
    "idle": lambda: Agent(idle),
    "hang": lambda: Agent(hang),
    "daemons": lambda: Agent(spawn_daemons),
    "fail": lambda: Agent(fail),
    "destroyed": lambda: Agent(destroy),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("round", range(3))
async def test_no_way_out_leaves_anything(
    world: World, monkeypatch: pytest.MonkeyPatch, way: str, round: int
) -> None:
    """Every agent is left to its end, or cancelled at a random moment, once or over and over."""
    monkeypatch.setattr("titogym.harnesses.episode.HARNESS_GRACE", 0.1)
    world.script(call("echo x > done; setsid sleep 1000 & sleep 0.1"), say("done"))
    chance = random.Random(f"{way} {round}")
    episode = asyncio.create_task(world.run(task(agent_seconds=0.5), WAYS[way]()))
    if round > 0:
        await asyncio.sleep(chance.uniform(0, 0.6))
        for _ in range(1 if round == 1 else 50):
            episode.cancel()
            await asyncio.sleep(0.002)
    try:
        result = await episode
    except asyncio.CancelledError:
        assert round > 0
    else:
        assert isinstance(result, EpisodeResult)
    await world.assert_nothing_left()


async def test_a_cancellation_while_the_sandbox_is_made_leaves_nothing(world: World) -> None:
    slow = SlowBackend(world.backend.root, seconds=0.5)
    episode = asyncio.create_task(
        run_episode(task(), harness=Agent(idle), backend=slow, gateway=world.gateway)
    )
    while not world.left_on_disk():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    await world.assert_nothing_left()


DRIVER = """
import asyncio, sys
from pathlib import Path
from tests.harnesses.world import task
from titogym.envs.sandboxes.local import LocalBackend
from titogym.gateway.client import GatewayClient
from titogym.harnesses.episode import run_episode
from titogym.harnesses.openai_loop import OpenAILoop

async def main(url, key, root):
    await run_episode(
        task(), harness=OpenAILoop(), backend=LocalBackend(Path(root)), gateway=GatewayClient(url, key),
        session_options={"ttl_seconds": 0.5},
    )

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_killed_driver_leaves_nothing(world: World, gateway_process: GatewayProcess) -> None:
    world.script(call("setsid sleep 1000 & echo started; sleep 1000"))
    arguments = [gateway_process.url, gateway_process.admin_key, str(world.backend.root)]
    driver = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, *arguments, cwd=Path(__file__).parents[2]
    )
    try:
        deadline = time.monotonic() + 30
        while not any("sleep" in line for line in _children_of(driver.pid)):
            assert time.monotonic() < deadline, "the agent's command did not start"
            assert driver.returncode is None
            await asyncio.sleep(0.02)
    finally:
        with suppress(ProcessLookupError):
            os.kill(driver.pid, signal.SIGKILL)
        await driver.wait()
    deadline = time.monotonic() + 10
    while processes(driver.pid) or _children_of(driver.pid):
        assert time.monotonic() < deadline, "processes outlive their driver"
        await asyncio.sleep(0.02)
    while await world.gateway.sessions():
        assert time.monotonic() < deadline + 5, "the session outlives its time to live"
        await asyncio.sleep(0.2)
    world.script(say("done"))
    await world.run(task(), OpenAILoop())  # a backend that starts clears away what dead drivers left
    assert world.left_on_disk() == []


def _children_of(driver: int) -> list[str]:
    """Command lines of every process below `driver`'s sandboxes, by their control group or their parents."""
    import psutil

    try:
        return [" ".join(child.cmdline()) for child in psutil.Process(driver).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


async def test_an_engine_that_dies_in_mid_episode_fails_it(
    model_dir: Path, sandboxes: Path, tmp_path: Path
) -> None:
    engine = ScriptedEngine(lambda prompt, params: call("touch done"), tokenizer=Tokenizer.load(model_dir))
    engine.start()
    process = launch([engine.url], model_dir, directory=tmp_path)
    async with GatewayClient(process.url, process.admin_key) as gateway:
        world = World(engine, gateway, LocalBackend(sandboxes), os.getpid())

        async def die(sandbox: Sandbox, connection: Connection) -> HarnessResult:
            loop = asyncio.create_task(OpenAILoop(retries=0).run(task(), sandbox, connection))
            while len(engine.requests) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await asyncio.to_thread(engine.stop)
            return await loop

        result = await world.run(task(PASS_IF_DONE, turns=1000), Agent(die))
        await world.assert_nothing_left()
    process.stop()
    assert (result.outcome, result.reward) == ("engine_error", 1.0)
    assert result.error is not None
    assert "\n" not in result.error
    assert result.turns >= 2
    assert len(result.trajectories) == 1


async def test_faults_of_the_engine_do_not_spill_into_other_episodes(world: World) -> None:
    world.script(call("touch done"), say("done"))
    world.engine.faults.append(Fault("error", 0, 500))
    results = await asyncio.gather(*(world.run(task(PASS_IF_DONE), OpenAILoop(retries=0)) for _ in range(4)))
    assert sorted(result.outcome for result in results) == ["engine_error", *["finished"] * 3]


# --- begun ahead


async def test_a_warm_start_is_the_same_episode_and_what_is_not_taken_goes(world):
    world.script(call("cat notes.txt; touch done"), say("ok"))
    warm = WarmStarts(2, harness=OpenAILoop(), backend=world.backend, gateway=world.gateway)
    sample = task(PASS_IF_DONE)
    for number in range(3):
        warm.announce(sample, {"attempt": str(number)})
    while len(world.left_on_disk()) < 2:  # noqa: ASYNC110 (a disk has no event)
        await asyncio.sleep(0.01)
    result = await world.run(sample, OpenAILoop(), labels={"attempt": "0"}, warm=warm)
    assert (result.outcome, result.reward) == ("finished", 1.0)
    cold = await world.run(sample, OpenAILoop(), labels={"attempt": "unannounced"}, warm=warm)
    assert cold.reward == 1.0
    cancelled = asyncio.create_task(world.run(sample, OpenAILoop(), labels={"attempt": "1"}, warm=warm))
    await asyncio.sleep(0.02)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    await warm.close()
    await world.assert_nothing_left()
