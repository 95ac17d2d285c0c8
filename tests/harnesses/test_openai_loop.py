"""The OpenAI loop against the real gateway, a scripted engine and real sandboxes."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.doubles.scripted_engine import Fault
from tests.harnesses.world import PASS_IF_DONE, World, call, raw_call, say, task
from titogym.envs.sandboxes.base import ExecResult
from titogym.harnesses.openai_loop import OpenAILoop, render, shorten

pytestmark = pytest.mark.sandbox


async def test_an_attempt_is_graded_and_its_tokens_are_those_of_the_engine(world: World) -> None:
    world.script(call("cat notes.txt; touch done"), say("It is done."))
    result = await world.run(task(PASS_IF_DONE), OpenAILoop())

    assert (result.outcome, result.reward, result.error, result.turns) == ("finished", 1.0, None, 2)
    assert result.usable
    assert not result.failed
    assert result.mismatches == {}
    (trajectory,) = result.trajectories
    assert trajectory.reward == 1.0
    first, second = (request["input_ids"] for request in world.engine.requests)
    sampled = [call("cat notes.txt; touch done"), say("It is done.")]
    assert trajectory.tokens == second + world.encode(sampled[1])
    assert second[: len(first)] == first
    trained = [token for token, mask in zip(trajectory.tokens, trajectory.loss_mask, strict=True) if mask]
    assert trained == world.encode(sampled[0]) + world.encode(sampled[1])
    assert "first line" in world.prompts()[1]
    assert set(result.seconds) == {"setup", "agent", "grade", "collect"}


@pytest.mark.parametrize(
    ("turn", "reply"),
    [
        (call("ls", name="python"), "there is no tool 'python'"),
        (raw_call("bash", '{"cmd": "ls"}'), "error: the arguments must be JSON"),
        (raw_call("bash", '{"command": 3}'), "error: the arguments must be JSON"),
        (raw_call("bash", '{"command": '), "error: the arguments must be JSON"),
        (say("<tool_call>bash ls</tool_call>"), "could not be read"),
        (call("exit 3"), "[exit code 3]"),
        (call("true"), "(no output)"),
        (call("echo out; echo err >&2"), "out\nerr"),
        (call("echo early; sleep 60"), "early\n[timed out]"),
    ],
)
async def test_what_the_model_reads_after_a_call(world: World, turn: str, reply: str) -> None:
    world.script(turn, say("done"))
    result = await world.run(task(), OpenAILoop(command_seconds=0.5))
    assert reply in world.prompts()[1]
    assert (result.outcome, result.turns) == ("finished", 2)


async def test_several_calls_of_one_turn_are_answered_in_order(world: World) -> None:
    world.script(
        call("echo one > a").removesuffix("<|im_end|>") + "\n" + call("cat a; echo two"), say("done")
    )
    await world.run(task(), OpenAILoop())
    assert world.prompts()[1].index("(no output)") < world.prompts()[1].index("one\ntwo")


async def test_the_prompts_are_the_callers(world: World) -> None:
    world.script(say("done"))
    await world.run(task(instruction="Count."), OpenAILoop(system="", tool_description="t"))
    await world.run(task(instruction="Count."), OpenAILoop(system="In {workdir}."))
    bare, with_system = world.prompts()
    assert bare.startswith("<|im_start|>system\ntools: bash(command)<|im_end|>\n<|im_start|>user\nCount.")
    assert with_system.startswith("<|im_start|>system\nIn /workspace.\n")


@pytest.mark.parametrize(
    ("script", "limits", "options", "outcome", "sentence"),
    [
        ([call("true")], {"turns": 3}, {}, "turn_limit", "limit of 3 turns"),
        ([call("true")], {"tokens": 150}, {}, "token_limit", "150"),
        (["x" * 20_000], {}, {"max_tokens": 50}, "token_limit", "before the model ended it"),
        (["x" * 20_000], {}, {}, "token_limit", "before the model ended it"),
        ([call("seq 3000")], {"turns": 50}, {}, "context_limit", "outgrew"),
        ([call("sleep 60")], {"agent_seconds": 0.7}, {}, "timeout", "limit of 0.7 s"),
    ],
    ids=["turns", "tokens", "endless-turn", "endless-context", "context", "time"],
)
async def test_every_limit_stops_the_agent_and_its_work_is_graded(
    world: World,
    script: list[str],
    limits: dict[str, Any],
    options: dict[str, Any],
    outcome: str,
    sentence: str,
) -> None:
    world.script(*script)
    result = await world.run(task(**limits), OpenAILoop(**options))
    assert result.outcome == outcome
    assert sentence in (result.error or "")
    assert result.reward == 1.0
    assert result.usable
    assert result.failed
    assert sum(trajectory.loss_mask.count(1) for trajectory in result.trajectories) > 0


async def test_a_model_that_does_not_answer_is_left_at_the_limit(world: World) -> None:
    world.script(call("touch done"), say("too slow" * 1000))
    world.engine.token_latency = 0.01
    result = await world.run(task(PASS_IF_DONE, agent_seconds=3), OpenAILoop())
    assert result.outcome == "timeout"
    assert (result.turns, result.reward) == (1, 1.0)


@pytest.mark.parametrize(
    "fault", [Fault("error", 0, 500), Fault("drop", 3), Fault("null_logprobs", 0)], ids=lambda f: f.kind
)
async def test_an_engine_that_fails_fails_the_episode(world: World, fault: Fault) -> None:
    world.script(call("touch done"), say("done"))
    world.engine.faults += [fault, fault]
    result = await world.run(task(PASS_IF_DONE), OpenAILoop(retries=0))
    assert result.outcome == "engine_error"
    assert "The engine failed" in (result.error or "")
    assert not result.usable
    world.engine.faults.clear()


async def test_the_sdk_repeats_a_request_that_failed_once(world: World) -> None:
    world.script(say("done"))
    world.engine.faults.append(Fault("error", 0, 500))
    result = await world.run(task(), OpenAILoop(retries=1))
    assert (result.outcome, result.turns) == ("finished", 1)


async def test_one_harness_serves_many_episodes_at_once(world: World) -> None:
    world.script(call("echo $HOME"), say("done"))
    agent = OpenAILoop()
    world.engine.token_latency = 0.002
    results = await asyncio.gather(*(world.run(task(), agent) for _ in range(12)))
    assert {result.outcome for result in results} == {"finished"}
    assert len({result.session_id for result in results}) == 12
    assert world.engine.most_in_flight > 1


@given(st.text(max_size=400), st.integers(0, 60))
def test_a_shortened_text_keeps_both_ends(text: str, limit: int) -> None:
    short = shorten(text, limit)
    if len(text) <= limit:
        assert short == text
        return
    head, tail = (limit + 1) // 2, limit // 2
    note = f"\n[... {len(text) - limit} characters left out ...]\n"
    assert short == text[:head] + note + text[len(text) - tail :]


def test_what_stands_out_is_said_after_the_output() -> None:
    assert render(ExecResult(137, "a", "", out_of_memory=True), 100) == "a\n[killed: out of memory]"
    assert render(ExecResult(0, "a\n", "", truncated=True), 100) == (
        "a\n[output cut: the command wrote too much]"
    )


def test_the_request_is_the_sdks_own() -> None:
    """`post` with a body sends what `chat.completions.create` sends."""
    import httpx
    import openai

    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(
            (request.method, request.url, json.loads(request.content), request.headers["user-agent"])
        )
        return httpx.Response(400, json={"error": {"message": "no"}})

    async def ask() -> None:
        pool = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        client = openai.AsyncOpenAI(api_key="k", base_url="http://host/v1", http_client=pool, max_retries=0)
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        with pytest.raises(openai.BadRequestError):
            await client.post("/chat/completions", cast_to=object, body=body)
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(**body)

    asyncio.run(ask())
    assert bodies[0] == bodies[1]
