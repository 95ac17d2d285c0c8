"""What goes wrong inside: in mid-stream, in an engine's tokens, before a session is known."""

import asyncio
import logging
import socket
import sqlite3
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.gateway.conftest import Serve
from tests.gateway.test_disconnect import until
from tests.gateway.test_turns import USER, create, inspect, sdk
from titogym.gateway.alias import alias
from titogym.gateway.sessions.store import SessionStore
from titogym.gateway.tokens.parsers.answer import AnswerParser

PATHS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [USER], "max_tokens": 90},
    "responses": {"input": "Look."},
    "messages": {"messages": [USER], "max_tokens": 90},
}


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_an_error_of_our_own_is_told_in_the_protocols_words(
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    stream: bool,
    started: bool,
) -> None:
    stand = serve(["one two three four"], engine={"token_latency": 0.02})
    session = create(stand.url)
    push, pieces = AnswerParser.push, []

    def broken(self: AnswerParser, ids: Any) -> Any:
        pieces.append(ids)
        if len(pieces) > (4 if started else 0):
            raise ZeroDivisionError("made up")
        return push(self, ids)

    monkeypatch.setattr(AnswerParser, "push", broken)
    with caplog.at_level(logging.ERROR, "titogym.gateway"):
        answer = httpx.post(
            f"{session.base_url}/{path}", json={"model": "m", "stream": stream, **PATHS[path]}, timeout=20
        )
    monkeypatch.undo()
    if started and stream:
        assert answer.status_code == 200
        last = [line for line in answer.text.splitlines() if line.startswith("data: ")][-1]
        assert "The gateway failed" in last
        assert "error" in last
    elif stream or not started:
        assert answer.status_code == 500
        assert "The gateway failed" in answer.json()["error"]["message"]
    if stream or not started:
        [record] = [record for record in caplog.records if record.message == "turn_failed"]
        assert record.fields == {"session": alias(session.id)}  # type: ignore[attr-defined]
        report = inspect(stand.url, session)
        assert report["turns"] == 0
        assert report["errors"] == {"internal_error": 1}
    assert httpx.post(f"{session.base_url}/{path}", json={"model": "m", **PATHS[path]}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_beyond_the_vocabulary_are_the_engines_failure(serve: Serve, stream: bool) -> None:
    stand = serve(["fine"], engine={"token_latency": 0.02})
    session = create(stand.url)
    script = stand.engine.script
    beyond = stand.assets.tokenizer.vocab_size
    stand.engine.script = lambda prompt, params: [5, 6, beyond, 7]
    body = {"messages": [USER], "stream": stream}
    answer = httpx.post(f"{session.base_url}/chat/completions", json=body)
    assert "vocabulary" in answer.text
    assert answer.status_code == (200 if stream else 503)
    assert inspect(stand.url, session)["turns"] == 0
    stand.engine.script = script
    assert sdk(session).chat.completions.create(model="m", messages=[USER]).choices[0].message.content


def test_an_answer_that_comes_whole_lets_others_have_their_turn(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long one is parsed in pieces, between which the event loop turns."""
    stand = serve([" ".join(["word"] * 3000)], engine={"context_length": 40_000})
    session = create(stand.url)
    turns: list[int] = []
    push = AnswerParser.push

    def seen(self: AnswerParser, ids: Any) -> Any:
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: turns.append(len(ids)))
        turns.append(-1)
        return push(self, ids)

    monkeypatch.setattr(AnswerParser, "push", seen)
    sdk(session).chat.completions.create(model="m", messages=[USER])
    assert len(turns) > 10
    assert all(size <= 512 for size in turns)
    assert turns[:-1:2] == [-1] * (len(turns) // 2)  # each piece is followed by a turn of the loop


@pytest.mark.parametrize("path", ["chat/completions", "responses/input_tokens"])
def test_no_body_is_read_for_an_unknown_session(serve: Serve, path: str) -> None:
    url = urlsplit(serve(["x"]).url)
    with socket.create_connection((url.hostname, url.port)) as connection:
        head = f"POST /sessions/none/v1/{path} HTTP/1.1\r\nhost: x\r\ncontent-length: 9000000\r\n\r\n"
        connection.sendall(head.encode())
        connection.settimeout(5)
        assert b" 404 " in connection.recv(200)


def test_a_body_that_says_that_it_is_too_large_is_not_read(serve: Serve) -> None:
    stand = serve(["x"], max_body_bytes=1024)
    url = urlsplit(create(stand.url).base_url)
    with socket.create_connection((url.hostname, url.port)) as connection:
        head = f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1025\r\n\r\n"
        connection.sendall(head.encode())
        connection.settimeout(5)
        assert b" 413 " in connection.recv(200)


def test_headers_that_name_two_sessions_name_none(serve: Serve) -> None:
    stand = serve(["x"])
    one, two = create(stand.url), create(stand.url)
    url = f"{stand.url}/v1/chat/completions"
    body = {"messages": [USER]}

    def ask(*headers: tuple[str, str]) -> int:
        return httpx.post(url, json=body, headers=list(headers)).status_code

    assert ask(("x-titogym-session", one.id), ("x-titogym-session", two.id)) == 400
    assert ask(("x-api-key", one.id), ("x-api-key", two.id)) == 400
    assert ask(("authorization", f"Bearer {one.id}"), ("authorization", f"Bearer {two.id}")) == 400
    assert ask(("x-titogym-session", ""), ("authorization", f"Bearer {one.id}")) == 401
    assert ask(("x-api-key", ""), ("authorization", "Bearer")) == 401
    assert ask() == 401
    assert ask(("x-api-key", "no such key"), ("authorization", f"Bearer {one.id}")) == 404
    assert [inspect(stand.url, session)["turns"] for session in (one, two)] == [0, 0]
    assert ask(("x-titogym-session", one.id), ("x-titogym-session", one.id)) == 200
    assert ask(("x-titogym-session", one.id), ("x-api-key", two.id)) == 200
    assert ask(("x-api-key", ""), ("authorization", f"bearer {two.id}")) == 200
    assert [inspect(stand.url, session)["turns"] for session in (one, two)] == [1, 1]


def test_a_session_that_left_memory_while_its_request_was_read_is_the_one_that_is_served(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn is committed to the session as it is when the body is there, not as it was before."""
    stand = serve(["one", "two", "three"], idle_seconds=0.2)
    session = create(stand.url)
    monkeypatch.setattr("titogym.gateway.app._SWEEP_SECONDS", 0.05)
    url = urlsplit(session.base_url)
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    with socket.create_connection((url.hostname, url.port)) as connection:
        head = f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode())
        time.sleep(0.6)
        assert sdk(session).chat.completions.create(model="m", messages=[USER])
        connection.sendall(body)
        connection.settimeout(5)
        assert b" 409 " in connection.recv(200)  # it leaves the conversation that the session now has
    assert inspect(stand.url, session)["turns"] == 1


def test_a_sweep_that_fails_is_not_the_last(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[int] = []

    def failing(self: SessionStore) -> None:
        sweeps.append(len(sweeps))
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr("titogym.gateway.app._SWEEP_SECONDS", 0.02)
    monkeypatch.setattr(SessionStore, "sweep", failing)
    stand = serve(["x"])
    until(lambda: len(sweeps) > 2)
    assert httpx.get(f"{stand.url}/health").status_code == 200
