"""Requests and answers at the edge of what can be read, written or parsed in time."""

import sqlite3
import time
from typing import Any

import httpx
import orjson
import pytest

from tests.gateway.test_fuzz import BODIES
from tests.gateway.test_turns import CALL, TOOLS, USER, create, inspect
from titogym.gateway.sessions.journal import Journal
from titogym.gateway.tokens.parsers.answer import AnswerParser

ASKED = {"model": "m", "max_tokens": 5, "messages": [USER]}
ITEMS = {"model": "m", "input": [USER]}


@pytest.fixture(scope="module")
def stand(module_serve):
    return module_serve(["fine"])


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def deep(path: str, levels: int) -> list[dict[str, Any]]:
    """A request that is nested in each place of its protocol that is kept or passed on."""
    inside = nested(levels)
    if path == "responses":
        return [
            {**ITEMS, "tools": [{"type": "function", "name": "f", "parameters": inside}]},
            *({**ITEMS, name: inside} for name in ("metadata", "text", "reasoning")),
        ]
    if path == "messages":
        used = {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "f", "input": inside}],
        }
        return [
            {**ASKED, "messages": [USER, used, USER]},
            {**ASKED, "tools": [{"name": "f", "input_schema": inside}]},
        ]
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": inside}}
    return [
        {**ASKED, "messages": [USER, {"role": "assistant", "tool_calls": [called]}, USER]},
        {**ASKED, "tools": [{"type": "function", "function": {"name": "f", "parameters": inside}}]},
        {**ASKED, "response_format": {"type": "json_schema", "json_schema": {"schema": inside}}},
        {**ASKED, "chat_template_kwargs": {"enable_thinking": inside}},
    ]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("levels", [100, 225, 240, 260, 500])
def test_deep_requests_are_served_or_refused(stand, path, levels):
    for body in deep(path, levels):
        # By hand: the writer that is tested against its limit has one, too.
        mark = b'"%d"' % levels
        raw = orjson.dumps(_swapped(body, nested(levels), str(levels)))
        raw = raw.replace(mark, b'{"a":' * levels + b"{}" + b"}" * levels)
        session = create(stand.url)
        response = httpx.post(f"{session.base_url}/{path}", content=raw, timeout=20)
        assert response.status_code in (200, 400), response.text
        assert (response.status_code == 200) == (levels < 230), response.text
        assert inspect(stand.url, session)["turns"] == (response.status_code == 200)


def _swapped(body: Any, old: Any, new: Any) -> Any:
    """`body` with `new` in place of `old`."""
    if isinstance(body, dict):
        return new if body == old else {key: _swapped(value, old, new) for key, value in body.items()}
    return [_swapped(value, old, new) for value in body] if isinstance(body, list) else body


@pytest.mark.parametrize("name", ["seed", "top_k", "temperature"])
@pytest.mark.parametrize("number", ["1" * 30, "inf", "nan"])
def test_numbers_that_json_cannot_hold_are_refused(stand, name, number):
    if name == "temperature" and number.isdecimal():
        return  # a float
    asked = httpx.post(f"{create(stand.url).base_url}/chat/completions", json={**ASKED, name: number})
    forced = httpx.post(f"{stand.url}/sessions", json={"sampling": {name: number}})
    for response in (asked, forced):
        assert response.status_code == 400, response.text
        assert name in response.json()["error"]["message"]


@pytest.mark.parametrize("spec", [{"ttl_seconds": "inf"}, {"limits": {"tokens": "9" * 30}}])
def test_session_options_that_json_cannot_hold_are_refused(stand, spec):
    assert httpx.post(f"{stand.url}/sessions", json=spec).status_code == 400


def test_numbers_of_many_digits_are_numbers_or_refused(stand):
    session, digits = create(stand.url), "9" * 5000
    headers = {"x-stainless-retry-count": digits}
    answer = httpx.post(f"{session.base_url}/responses", json=ITEMS, headers=headers)
    assert answer.status_code == 200
    id = answer.json()["id"]
    for path, status in (
        (f"{session.base_url}/responses/{id}/input_items?limit={digits}", 400),
        (f"{stand.url}/sessions/{session.id}/rows/{digits}", 404),
        (f"{stand.url}/sessions/{session.id}/rows/{digits}/tokens", 404),
    ):
        assert httpx.get(path).status_code == status


@pytest.mark.parametrize("number", ["0", "7", "9" * 5000])
def test_a_reference_to_a_call_that_the_answer_has_not_is_refused(stand, number):
    session = create(stand.url)
    id = httpx.post(f"{session.base_url}/responses", json=ITEMS).json()["id"].removeprefix("resp_")
    reference = {"type": "item_reference", "id": f"fc_{id}_{number}"}
    again = httpx.post(f"{session.base_url}/responses", json={**ITEMS, "input": [USER, reference, USER]})
    assert again.status_code == 404
    assert "not found" in again.json()["error"]["message"]


def test_the_time_of_an_answer_full_of_marks_grows_with_its_length(assets):
    def seconds(times: int) -> float:
        ids = assets.tokenizer.encode(CALL) * times
        parser = AnswerParser(assets.family, assets.tokenizer, stop_ids=assets.stop_ids, tools=TOOLS)
        start = time.perf_counter()
        parser.push(ids)
        parser.finish()
        assert len(parser.message().tool_calls) == times
        return time.perf_counter() - start

    seconds(1)
    assert seconds(16_000) < 10 * seconds(4_000)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", BODIES)
def test_a_full_disk_is_told_and_nothing_is_committed(stand, monkeypatch, path, stream):
    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    session = create(stand.url)
    body = {**(ITEMS if path == "responses" else ASKED), "stream": stream}
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", full)
        response = httpx.post(f"{session.base_url}/{path}", json=body)
    assert response.status_code == (200 if stream else 503)
    assert "disk is full" in response.text
    assert inspect(stand.url, session)["turns"] == 0
    assert httpx.post(f"{session.base_url}/{path}", json=body).status_code == 200
    assert inspect(stand.url, session)["turns"] == 1


@pytest.mark.parametrize("place", ["content", "arguments", "tools"])
def test_text_that_no_context_holds_is_refused_unencoded(stand, place):
    """Encoding takes hundreds of bytes for each: a large body would else take the gateway's memory."""
    long = "word " * 800_000
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": orjson.dumps(long).decode()},
    }
    tool = {"type": "function", "function": {"name": "f", "description": long}}
    asked = {
        "content": {**ASKED, "messages": [{"role": "user", "content": long}]},
        "arguments": {**ASKED, "messages": [USER, {"role": "assistant", "tool_calls": [call]}, USER]},
        "tools": {**ASKED, "tools": [tool]},
    }[place]
    known, started = len(stand.engine.requests), time.monotonic()
    refused = httpx.post(create(stand.url).base_url + "/chat/completions", json=asked, timeout=60)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "characters" in refused.json()["error"]["message"]
    assert time.monotonic() - started < 5
    assert len(stand.engine.requests) == known
