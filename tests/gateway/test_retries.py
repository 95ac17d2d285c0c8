"""Requests that come twice: joined in flight, answered again afterwards, and never sampled twice for it."""

import asyncio
import re
import time
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.doubles.scripted_engine import Fault
from tests.gateway.test_messages import TOOLS as MESSAGES_TOOLS
from tests.gateway.test_responses import TOOLS as RESPONSES_TOOLS
from tests.gateway.test_turns import CALL, THINK, TOOLS, USER, create, inspect, replay, sdk
from titogym.gateway.sessions.flights import Attempts
from titogym.gateway.sessions.tree import Receipt
from titogym.gateway.sessions.turn import Planned

Json = dict[str, Any]

RETRY = {"x-stainless-retry-count": "1"}
BODIES: dict[str, Json] = {
    "chat/completions": {"model": "m", "messages": [USER], "tools": TOOLS},
    "messages": {"model": "m", "max_tokens": 500, "messages": [USER], "tools": MESSAGES_TOOLS},
    "responses": {"model": "m", "input": [USER], "tools": RESPONSES_TOOLS},
}


def summary(url: str, session) -> Json:
    report = inspect(url, session)
    tree = report["tree"]
    counts = report["diagnostics"]
    return {"nodes": len(tree), "joined": counts["joined"], "replayed": counts["replayed"]}


def events(body: str) -> list[str]:
    """The data of a stream, without the count of its events."""
    lines = [line for line in body.splitlines() if line.startswith("data:")]
    return [re.sub(r'"sequence_number":\d+,', "", line) for line in lines]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_retry_in_flight_joins_and_a_later_one_is_given_the_answer_again(serve, path, stream):
    stand = serve([f"{THINK}I look.\n{CALL}"], engine={"token_latency": 0.005})
    session = create(stand.url)
    body = {**BODIES[path], "stream": stream}
    async with httpx.AsyncClient(base_url=session.base_url + "/", timeout=30) as http:
        first = asyncio.create_task(http.post(path, json=body))
        await asyncio.sleep(0.15)
        joined = asyncio.create_task(http.post(path, json=body, headers=RETRY))
        one, two = await asyncio.gather(first, joined)
        later = await http.post(path, json=body, headers=RETRY)
    assert one.status_code == two.status_code == later.status_code == 200
    assert one.text == two.text
    if not stream:
        assert one.json() == later.json()
    else:
        assert len(events(later.text)) < len(events(one.text))  # as one piece, not as it was sampled
        assert events(later.text)[-1] == events(one.text)[-1]
    assert len(stand.engine.requests) == 1
    assert summary(stand.url, session) == {"nodes": 1, "joined": 1, "replayed": 1}


@pytest.mark.parametrize("policy", ["linear", "branching"])
def test_the_idempotency_key_names_a_request(serve, policy):
    stand = serve(["one", "two"])
    session = create(stand.url, policy=policy)
    client = sdk(session)

    def ask(key: str, text: str = "hi"):
        return client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": text}], extra_headers={"Idempotency-Key": key}
        )

    first = ask("a")
    assert ask("a") == first
    with pytest.raises(openai.ConflictError, match="idempotency key"):
        ask("a", "other")
    second = ask("b")
    assert second.choices[0].message.content == "two"
    assert summary(stand.url, session) == {"nodes": 2, "joined": 0, "replayed": 1}


@pytest.mark.parametrize("policy", ["linear", "branching"])
def test_each_key_is_given_its_own_answer_again(serve, tmp_path, policy):
    """Also where the same request was made under several keys, as by agents that sample it in parallel."""
    stand = serve(["one", "two", "three"], journal=tmp_path / "journal.db")
    session = create(stand.url, policy=policy)
    client = sdk(session)

    def ask(headers: dict[str, str]):
        return client.chat.completions.create(model="m", messages=[USER], extra_headers=headers)

    keys = [{"Idempotency-Key": key} for key in "ab"]
    answers = [ask(key) for key in keys]
    latest = ask({})
    assert [ask(key) for key in keys] == answers
    assert ask(RETRY) == latest
    stand.restart()
    assert [ask(key) for key in keys] == answers
    assert len(stand.engine.requests) == 3


def test_a_retry_of_an_attempt_that_failed_is_sampled(serve):
    """Even where an earlier attempt at the same request had succeeded: that one was answered."""
    stand = serve(["one", "two"])
    session = create(stand.url, policy="branching")
    client = sdk(session)
    first = client.chat.completions.create(model="m", messages=[USER])
    stand.engine.faults.append(Fault("error", 0, 500))
    patient = client.with_options(max_retries=2)
    second = patient.chat.completions.create(model="m", messages=[USER])
    assert (first.choices[0].message.content, second.choices[0].message.content) == ("one", "two")
    assert summary(stand.url, session) == {"nodes": 2, "joined": 0, "replayed": 0}


def test_a_retry_after_a_restart_is_given_the_answer_again(serve, tmp_path):
    stand = serve(["one", "two"], journal=tmp_path / "journal.db")
    session = create(stand.url)
    client = sdk(session)
    first = client.chat.completions.create(model="m", messages=[USER])
    stand.restart()
    again = client.chat.completions.create(model="m", messages=[USER], extra_headers=RETRY)
    assert again == first
    assert len(stand.engine.requests) == 1


async def test_a_turn_goes_on_while_one_of_its_readers_stays(serve):
    stand = serve(["a long answer indeed"], engine={"token_latency": 0.03})
    session = create(stand.url)
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    first = asyncio.create_task(client.chat.completions.create(model="m", messages=[USER]))
    await asyncio.sleep(0.15)
    second = asyncio.create_task(
        client.chat.completions.create(model="m", messages=[USER], extra_headers=RETRY)
    )
    await asyncio.sleep(0.1)
    first.cancel()
    answer = await second
    assert answer.choices[0].message.content == "a long answer indeed"
    assert stand.engine.aborted == []
    assert summary(stand.url, session) == {"nodes": 1, "joined": 1, "replayed": 0}


async def test_a_turn_ends_when_its_last_reader_leaves(serve):
    stand = serve(["a long answer indeed"], engine={"token_latency": 0.1})
    session = create(stand.url)
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    ask = client.chat.completions.create
    readers = [asyncio.create_task(ask(model="m", messages=[USER]))]
    await asyncio.sleep(0.2)
    readers.append(asyncio.create_task(ask(model="m", messages=[USER], extra_headers=RETRY)))
    await asyncio.sleep(0.2)
    for reader in readers:
        reader.cancel()
    started = time.monotonic()
    while not stand.engine.aborted:
        await asyncio.sleep(0.02)
        assert time.monotonic() - started < 1
    report = await asyncio.to_thread(inspect, stand.url, session)
    assert (report["turns"], report["in_flight"], report["diagnostics"]["aborted"]) == (0, 0, 1)


def test_a_lost_reply_and_a_shorter_history_are_a_retry(serve):
    """The engine had answered, the client never saw it, and says what it said before that."""
    stand = serve(["one", "two", "lost", "found", "on"])
    session = create(stand.url)
    client = sdk(session)
    messages: list[Any] = [USER]
    for _ in range(2):
        messages += [replay(client.chat.completions.create(model="m", messages=messages)), USER]
    client.chat.completions.create(model="m", messages=messages)  # its reply never arrives
    for _ in range(2):
        answer = client.chat.completions.create(model="m", messages=messages)
        messages += [replay(answer), USER]
    assert [m["content"] for m in messages if m["role"] == "assistant"] == ["one", "two", "found", "on"]
    report = inspect(stand.url, session)
    assert (report["turns"], report["counters"]["superseded"], report["errors"]) == (4, 1, {})


def test_a_lost_first_reply_does_not_poison_the_session(serve):
    stand = serve(["lost", "found", "on"])
    session = create(stand.url)
    client = sdk(session)
    client.chat.completions.create(model="m", messages=[USER])
    messages: list[Any] = [USER]
    for _ in range(2):
        messages += [replay(client.chat.completions.create(model="m", messages=messages)), USER]
    report = inspect(stand.url, session)
    assert (report["turns"], report["counters"]["superseded"], report["errors"]) == (2, 1, {})


async def test_a_retry_while_the_first_attempt_ends_keeps_its_key():
    ended, attempts = asyncio.Event(), Attempts()
    receipt = Receipt(request="asked", key="k")

    async def sampling():
        try:
            await asyncio.sleep(60)
            yield Planned(1)
        finally:
            await ended.wait()  # as an engine is told to stop

    first = attempts.start(receipt, sampling)
    reader = first.board()
    await asyncio.sleep(0)
    await reader.aclose()
    assert attempts.earlier(receipt, False) is None
    second = attempts.start(receipt, sampling)
    reader = second.board()
    ended.set()
    await asyncio.wait([first.task])
    await asyncio.sleep(0)
    assert attempts.earlier(receipt, False) is second
    await reader.aclose()
