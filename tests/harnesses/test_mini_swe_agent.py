"""The real mini-swe-agent from PyPI, inside a real sandbox, against the real gateway."""

import json
from pathlib import Path

import pytest

from tests.harnesses.world import PASS_IF_DONE, World, call, say, task
from titogym.harnesses.base import Harness
from titogym.harnesses.registry import harness

# The first run installs it.
pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(900)]

SUBMIT = call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


@pytest.fixture(scope="module")
def agent() -> Harness:
    return harness("mini_swe_agent")


async def test_it_works_on_a_task_and_trains_token_exact(world: World, agent: Harness) -> None:
    """It drops an answer without a tool call and complains in its place: that turn is sampled again."""
    turns = iter([call("cat notes.txt; touch done"), say("Let me think."), SUBMIT])
    world.engine.script = lambda prompt, params: next(turns)
    result = await world.run(task(PASS_IF_DONE, agent_seconds=240), agent)

    assert (result.outcome, result.reward, result.error) == ("finished", 1.0, None), result.log[-2000:]
    assert result.mismatches == {}
    (trajectory,) = result.trajectories
    assert trajectory.tokens == world.engine.requests[-1]["input_ids"] + world.encode(SUBMIT)
    trained = [token for token, mask in zip(trajectory.tokens, trajectory.loss_mask, strict=True) if mask]
    assert trained == world.encode(call("cat notes.txt; touch done")) + world.encode(SUBMIT)
    assert "first line" in world.prompts()[1]
    assert "Tool call error" in world.prompts()[2]
    told = json.loads(result.log)
    assert told["info"]["exit_status"] == "Submitted"
    assert told["info"]["mini_version"] == "2.4.6"


async def test_it_keeps_the_tasks_limit_of_turns(world: World, agent: Harness) -> None:
    world.script(call("true"))
    result = await world.run(task(agent_seconds=240, turns=2), agent)
    assert (result.outcome, result.turns, result.reward) == ("turn_limit", 2, 1.0)
    assert json.loads(result.log)["info"]["exit_status"] == "LimitsExceeded"


async def test_its_program_is_seen_by_the_sandbox_but_cannot_be_changed(world: World, agent: Harness) -> None:
    await agent.prepare()
    assert {Path(mount.target) for mount in agent.mounts()} == {mount.source for mount in agent.mounts()}
    targets = " ".join(mount.target for mount in agent.mounts())
    turns = iter([call(f"for d in {targets}; do touch $d/x; done"), SUBMIT])
    world.engine.script = lambda prompt, params: next(turns)
    await world.run(task(agent_seconds=240), agent)
    assert world.prompts()[1].count("Read-only file system") == len(agent.mounts())
