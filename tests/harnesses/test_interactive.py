"""Episodes of interactive environments: the loop, the real gateway, a scripted engine."""

import asyncio
import json
import pickle
from typing import Any, ClassVar

import pytest

from tests.harnesses.world import World, call, raw_call, say
from titogym.envs import registry
from titogym.envs.environment import DONE, Action, Observation, Tool, tool_result, user
from titogym.envs.sandboxes.base import Sandbox, SandboxError
from titogym.envs.task import Grade, GradingError, Limits, Task
from titogym.harnesses.command import Command
from titogym.harnesses.openai_loop import OpenAILoop

pytestmark = pytest.mark.sandbox

HERE = __name__


class Counter:
    """Answers twice, then is done; keeps what happened to it."""

    name = "counter"
    interactive = True
    needs_sandbox = False
    tools: tuple[Tool, ...] = (Tool("count", "Count."),)
    made: ClassVar[list["Counter"]] = []

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.actions: list[Action] = []
        Counter.made.append(self)

    async def reset(self, task: Task, sandbox: Sandbox | None) -> Observation:
        self.happened.append("reset")
        assert (sandbox is not None) == self.needs_sandbox
        return Observation((user(task.instruction),), self.tools)

    async def step(self, action: Action) -> Observation:
        self.happened.append("step")
        self.actions.append(action)
        if len(self.actions) == 3:
            return DONE
        results = [tool_result(call, "counted") for call in action.tool_calls]
        return Observation(tuple(results) or (user("go on"),))

    async def grade(self, task: Task, sandbox: Sandbox | None) -> Grade:
        self.happened.append("grade")
        return Grade(len(self.actions) / 3)

    async def close(self) -> None:
        self.happened.append("close")


class Machine(Counter):
    """Needs a sandbox."""

    name = "machine"
    needs_sandbox = True
    fault: Exception | None = None

    async def step(self, action: Action) -> Observation:
        assert self.fault is not None
        raise self.fault


class Lost(Machine):
    fault = SandboxError("the machine has gone")


class Buggy(Machine):
    fault = KeyError("oops")


class Ungraded(Counter):
    async def grade(self, task: Task, sandbox: Sandbox | None) -> Grade:
        raise GradingError("there is no verdict")


class Overpaid(Counter):
    async def grade(self, task: Task, sandbox: Sandbox | None) -> Grade:
        return Grade(2.0)


class Unpaid(Counter):
    async def grade(self, task: Task, sandbox: Sandbox | None) -> Grade:
        return Grade(float("nan"))


class Shrugging(Counter):
    async def grade(self, task: Task, sandbox: Sandbox | None) -> Any:
        return 0.5


class Mute(Counter):
    async def step(self, action: Action) -> Any:
        return None


class Unborn(Counter):
    async def reset(self, task: Task, sandbox: Sandbox | None) -> Any:
        self.happened.append("reset")


class Asleep(Counter):
    async def reset(self, task: Task, sandbox: Sandbox | None) -> Observation:
        await asyncio.sleep(60)
        raise AssertionError("nobody waits that long")


class Unready(Counter):
    async def reset(self, task: Task, sandbox: Sandbox | None) -> Observation:
        raise SandboxError("no world today")


class Leaving(Counter):
    async def step(self, action: Action) -> Observation:
        raise SystemExit("I am off")


class Echo(Counter):
    """Says what the model has said, as JSON means it."""

    async def step(self, action: Action) -> Observation:
        self.actions.append(action)
        said = json.loads(action.tool_calls[0].arguments)["text"]
        return Observation((tool_result(action.tool_calls[0], said),), done=len(self.actions) == 2)


class Speechless(Counter):
    tools = ()

    async def step(self, action: Action) -> Observation:
        self.actions.append(action)
        return Observation((user("go on"),), done=len(self.actions) == 3)


def task(environment: str = "Counter", **limits: Any) -> Task:
    return Task("t", "Count.", f"{HERE}:{environment}", limits=Limits(**{"agent_seconds": 30.0, **limits}))


@pytest.fixture(autouse=True)
def forgotten() -> None:
    Counter.made.clear()


async def test_the_environment_answers_every_turn(world: World) -> None:
    world.script(raw_call("count", '{"by": 2}'), say("hm"), call("x", name="other") + "")
    result = await world.run(task(), OpenAILoop())
    assert (result.outcome, result.reward, result.turns, result.error) == ("finished", 1.0, 3, None)
    (environment,) = Counter.made
    assert environment.happened == ["reset", "step", "step", "step", "grade", "close"]
    first, second, third = environment.actions
    assert [(c.name, json.loads(c.arguments)) for c in first.tool_calls] == [("count", {"by": 2})]
    assert (second.content, second.tool_calls) == ("hm", ())
    assert third.tool_calls[0].name == "other"
    last = world.prompts()[-1]
    assert "counted" in last
    assert "go on" in last
    assert '"name": "bash"' not in last
    assert '"count"' in last
    (trajectory,) = result.trajectories
    assert trajectory.reward == 1.0
    assert result.mismatches == {}
    assert pickle.loads(pickle.dumps(result)) == result


@pytest.mark.parametrize("source", ["arithmetic?level=3", "guess?level=2", "sql?level=1"])
async def test_the_built_in_ones_are_solved_through_the_gateway(world: World, source: str) -> None:
    """The reference's own actions, written as the model would."""
    chosen = registry.tasks(source, count=1)[0]
    if chosen.environment == "guess":
        low, high, secret = (chosen.metadata[name] for name in ("low", "high", "secret"))
        texts: list[str] = []
        while not texts or texts[-1] != say(str(secret)):
            middle = (low + high) // 2
            texts.append(say(str(middle)))
            low, high = (middle + 1, high) if middle < secret else (low, middle - 1)
    elif chosen.environment == "arithmetic":
        texts = [
            raw_call("calculate", json.dumps({"a": a, "operation": operation, "b": b}))
            for a, operation, b in chosen.metadata["steps"]
        ]
        texts.append(say(f"So it is {chosen.metadata['answer']}"))
    else:
        query = chosen.metadata["query"]
        texts = [raw_call("sql", json.dumps({"query": query})), say(f"```sql\n{query}\n```")]
    world.script(*texts)
    result = await world.run(chosen, OpenAILoop())
    assert (result.outcome, result.reward, result.turns) == ("finished", 1.0, len(texts)), result.error


async def test_a_call_that_could_not_be_read_is_told_so(world: World) -> None:
    world.script(say("<tool_call>count</tool_call>"))
    result = await world.run(task(turns=2), OpenAILoop())
    assert result.outcome == "turn_limit"
    assert "could not be read" in world.prompts()[1]
    assert Counter.made[0].actions == []


async def test_half_a_surrogate_pair_that_comes_back_is_no_fault(world: World) -> None:
    world.script(raw_call("count", r'{"text": "\ud800 here"}'))
    result = await world.run(task("Echo"), OpenAILoop())
    assert (result.outcome, result.turns) == ("finished", 2)
    assert "? here" in world.prompts()[1]


async def test_calls_without_tools_are_answered_for_the_environment(world: World) -> None:
    world.script(raw_call("count", "{}"))
    result = await world.run(task("Speechless"), OpenAILoop())
    assert (result.outcome, result.turns) == ("finished", 3)


@pytest.mark.parametrize(
    ("environment", "outcome", "sentence"),
    [
        ("Lost", "environment_error", "The environment 'machine' failed: the machine has gone"),
        ("Buggy", "environment_error", "KeyError: 'oops'"),
        ("Ungraded", "grading_error", "there is no verdict"),
        ("Overpaid", "grading_error", "The grade of the environment 'counter' holds 2.0; a reward is within"),
        ("Unpaid", "grading_error", "holds nan; a reward is finite"),
        ("Shrugging", "grading_error", "The environment 'counter' returned '0.5' from grade: return a Grade"),
        ("Mute", "environment_error", "step returned 'None', which is no Observation"),
        ("Leaving", "environment_error", "The environment 'counter' failed: SystemExit: I am off"),
        ("Unborn", "setup_error", "returned 'None' from reset: return an Observation"),
        ("Unready", "setup_error", "no world today"),
        ("Missing", "setup_error", "Missing"),
    ],
)
async def test_faults_of_the_environment(world: World, environment: str, outcome: str, sentence: str) -> None:
    world.script(say("x"))
    result = await world.run(task(environment), OpenAILoop())
    assert result.outcome == outcome
    assert sentence in (result.error or "")
    assert not result.usable
    assert all(made.happened[-1] == "close" for made in Counter.made)


async def test_a_reset_that_hangs_ends_in_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titogym.harnesses.episode.RESET_SECONDS", 0.2)
    result = await world.run(task("Asleep"), OpenAILoop())
    assert (result.outcome, result.error) == (
        "setup_error",
        "The environment 'counter' did not end its reset within 0 s.",
    )


async def test_a_program_cannot_play(world: World) -> None:
    result = await world.run(task(), Command("true"))
    assert result.outcome == "setup_error"
    assert "turn by turn" in (result.error or "")
    assert "openai_loop" in (result.error or "")


async def test_limits_hold_for_interactive_environments(world: World) -> None:
    world.script(say("x"))
    assert (await world.run(task(turns=2), OpenAILoop())).outcome == "turn_limit"
    assert (await world.run(task(tokens=3), OpenAILoop())).outcome == "token_limit"
    world.engine.token_latency = 0.5
    assert (await world.run(task(agent_seconds=0.3), OpenAILoop())).outcome == "timeout"
