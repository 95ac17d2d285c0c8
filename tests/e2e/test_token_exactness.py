"""The first contract, on the real engine: a trajectory is what SGLang was sent and what it returned.

A witness between gateway and engine records the raw exchange; nothing of it passes through our client.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doubles.recording_proxy import Exchange, RecordingProxy
from tests.gateway.conftest import Served
from titogym.gateway.app import create_app
from titogym.gateway.client import GatewayClient
from titogym.gateway.engines.launch import EngineProcess
from titogym.gateway.settings import GatewaySettings
from titogym.gateway.trajectories import Trajectory

pytestmark = pytest.mark.engine

EXAMPLES, SESSIONS = 10, 20  # together 200 sessions, those of one example at the same time
WORDS = st.text(st.sampled_from("abc xyz\n{}<|>é語🎉") | st.characters(codec="utf-8"), max_size=24)


@dataclass
class Stand:
    url: str
    witness: RecordingProxy


@pytest.fixture(scope="module")
def stand(sglang_server: EngineProcess, tiny_model: Path) -> Iterator[Stand]:
    witness = RecordingProxy(sglang_server.url)
    proxy = Served(witness.app)
    gateway = Served(
        create_app(
            GatewaySettings(engines=(f"http://127.0.0.1:{proxy.port}",), model_dir=tiny_model, family="qwen3")
        )
    )
    yield Stand(f"http://127.0.0.1:{gateway.port}", witness)
    gateway.stop()
    proxy.stop()


@st.composite
def turns(draw: st.DrawFn) -> list[dict[str, Any]]:
    """What an agent does in one session: what it appends, and how it asks."""
    script = []
    for number in range(draw(st.integers(2, 4))):
        roles = st.sampled_from(["user"] if number == 0 else ["user", "tool", "system", "assistant"])
        script.append(
            {
                "messages": draw(st.lists(st.tuples(roles, WORDS), min_size=1, max_size=2)),
                "stream": draw(st.booleans()),
                "max_tokens": draw(st.integers(1, 12)),
                "temperature": draw(st.sampled_from([0.0, 0.7, 1.0])),
            }
        )
    return script


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_trajectories_are_what_the_engine_was_sent_and_returned(stand: Stand, data: st.DataObject) -> None:
    scripts = [data.draw(turns()) for _ in range(SESSIONS)]
    stand.witness.exchanges.clear()
    trajectories = asyncio.run(_play(stand.url, scripts))
    by_row = {(*e.input_ids, *e.output_ids): e for e in stand.witness.exchanges}
    assert len(by_row) == len(stand.witness.exchanges) == sum(len(script) for script in scripts)
    for script, trajectory in zip(scripts, trajectories, strict=True):
        assert trajectory.turns == len(script)
        rows = _prefixes(trajectory, by_row)
        assert len(rows) == len(script)
        for earlier, later in pairwise(rows):
            held = len(earlier.input_ids) + len(earlier.output_ids)
            shared = _shared(trajectory.tokens[:held], later.input_ids)
            assert shared == held
            assert later.cached_tokens >= len(earlier.input_ids) - 1
        _check_masks(trajectory, rows)


async def _play(url: str, scripts: list[list[dict[str, Any]]]) -> list[Trajectory]:
    async with GatewayClient(url) as gateway:
        return await asyncio.gather(
            *(_session(gateway, number, script) for number, script in enumerate(scripts))
        )


async def _session(gateway: GatewayClient, number: int, script: list[dict[str, Any]]) -> Trajectory:
    handle = await gateway.create_session()
    # The number tells sessions apart that would otherwise ask the same and sample the same.
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"session {number}"}]
    async with openai.AsyncOpenAI(base_url=handle.base_url, api_key=handle.api_key, max_retries=0) as client:
        for turn in script:
            messages += [{"role": role, "content": text} for role, text in turn["messages"]]
            for message in messages:
                if message["role"] == "tool":
                    message.setdefault("tool_call_id", "call_0")
            options = {key: turn[key] for key in ("max_tokens", "temperature")}
            if turn["stream"]:
                messages.append(await _streamed(client, messages, options))
            else:
                done = await client.chat.completions.create(model="tiny", messages=messages, **options)
                messages.append(done.choices[0].message.model_dump(exclude_none=True))
    (trajectory,) = await gateway.trajectories(handle.id)
    await gateway.delete(handle.id)
    return trajectory


async def _streamed(
    client: openai.AsyncOpenAI, messages: list[Any], options: dict[str, Any]
) -> dict[str, Any]:
    """The message that a client puts together from the pieces of a stream."""
    message: dict[str, Any] = {"role": "assistant"}
    async for chunk in await client.chat.completions.create(
        model="tiny", messages=messages, stream=True, **options
    ):
        for choice in chunk.choices:
            delta = choice.delta.model_dump(exclude_none=True)
            for key in ("content", "reasoning_content"):
                message[key] = message.get(key, "") + delta.get(key, "")
            for piece in delta.get("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                if piece["index"] == len(calls):
                    calls.append(
                        {"id": piece["id"], "type": "function", "function": {"name": "", "arguments": ""}}
                    )
                for key, text in piece["function"].items():
                    calls[piece["index"]]["function"][key] += text
    return message


def _prefixes(trajectory: Trajectory, by_row: dict[tuple[int, ...], Exchange]) -> list[Exchange]:
    """The exchanges whose prompt and output the trajectory begins with, shortest first."""
    found = []
    for row, exchange in by_row.items():
        sampled = trajectory.loss_mask[len(exchange.input_ids) : len(row)]
        if tuple(trajectory.tokens[: len(row)]) == row and all(sampled):
            found.append(exchange)
    return sorted(found, key=lambda exchange: len(exchange.input_ids))


def _check_masks(trajectory: Trajectory, rows: list[Exchange]) -> None:
    """Sampled tokens, and they alone, carry loss, with the engine's own log-prob of that very token."""
    expected_mask, expected_logprobs = [0] * len(trajectory.tokens), [0.0] * len(trajectory.tokens)
    for exchange in rows:
        assert exchange.prompt_tokens == len(exchange.input_ids)
        assert exchange.completion_tokens == len(exchange.output_ids) == len(exchange.logprobs)
        for offset, (logprob, token, _) in enumerate(exchange.logprobs):
            place = len(exchange.input_ids) + offset
            assert token == exchange.output_ids[offset] == trajectory.tokens[place]
            expected_mask[place], expected_logprobs[place] = 1, logprob
    assert trajectory.loss_mask == expected_mask
    assert trajectory.logprobs == pytest.approx(expected_logprobs, abs=1e-6)
    covered = [place for start, end, _ in trajectory.version_spans for place in range(start, end)]
    assert covered == [place for place, masked in enumerate(expected_mask) if masked]


def _shared(left: list[int], right: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


def test_client_token_ids_are_refused(stand: Stand) -> None:
    created = httpx.post(stand.url + "/sessions", json={}).json()
    for field_name in ("input_ids", "prompt_token_ids"):
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], field_name: [1, 2]}
        answer = httpx.post(created["base_url"] + "/chat/completions", json=body)
        assert answer.status_code == 400, json.dumps(body)
        assert answer.json()["error"]["param"] == field_name
