"""Clients that go away, and sessions that are deleted, in mid-generation."""

import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import orjson
import pytest

from tests.gateway.test_turns import USER, create, inspect, sdk
from titogym.gateway.client import SessionHandle

SLOW = {"token_latency": 0.05}
LONG = "x" * 400


def leave(session: SessionHandle, stream: bool, seconds: float) -> None:
    """Ask for an answer and close the connection after `seconds`."""
    body = orjson.dumps({"model": "m", "messages": [USER], "stream": stream})
    url = urlsplit(session.base_url)
    with socket.create_connection((url.hostname, url.port)) as connection:
        head = f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        time.sleep(seconds)


def until(condition, seconds: float = 5.0) -> float:
    """Seconds until the condition holds."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds
        time.sleep(0.01)
    return time.monotonic() - start


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_engine_request_and_leaves_no_trace(serve, stream):
    stand = serve([LONG, "short"], engine=SLOW)
    session = create(stand.url)
    leave(session, stream, 0.4)
    assert until(lambda: stand.engine.in_flight == 0) < 1.0
    # told to stop, or cut off, or both: whichever reached the engine first
    assert set(stand.engine.aborted) == {stand.engine.requests[0]["rid"]}
    report = inspect(stand.url, session)
    assert (report["turns"], report["in_flight"], report["diagnostics"]["aborted"]) == (0, 0, 1)
    answer = sdk(session).chat.completions.create(model="m", messages=[USER])
    assert answer.choices[0].message.content == "short"


def test_a_client_that_goes_away_while_it_waits_for_its_turn_asks_nothing(serve):
    stand = serve(["a" * 30, "b"], engine=SLOW)
    session = create(stand.url)
    first: list[Any] = []
    thread = threading.Thread(
        target=lambda: first.append(sdk(session).chat.completions.create(model="m", messages=[USER]))
    )
    thread.start()
    until(lambda: stand.engine.in_flight == 1)
    leave(session, False, 0.2)
    thread.join()
    assert first[0].choices[0].message.content == "a" * 30
    assert len(stand.engine.requests) == 1
    assert inspect(stand.url, session)["turns"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_deleting_a_session_ends_its_turns_in_flight(serve, stream):
    stand = serve([LONG], engine=SLOW)
    session = create(stand.url)
    told: list[openai.APIError] = []

    def ask():
        try:
            answer = sdk(session).chat.completions.create(model="m", messages=[USER], stream=stream)
            list(answer)
        except openai.APIError as error:
            told.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: stand.engine.in_flight == 1)
    time.sleep(0.2)
    assert httpx.delete(f"{stand.url}/sessions/{session.id}").status_code == 204
    assert until(lambda: stand.engine.in_flight == 0) < 1.0
    thread.join(5)
    assert not thread.is_alive()
    assert told[0].code == "session_not_found"


def test_comments_keep_a_silent_stream_alive(serve, monkeypatch):
    monkeypatch.setattr("titogym.gateway.answering.KEEP_ALIVE_SECONDS", 0.1)
    stand = serve(["abc"], engine={"token_latency": 0.25})
    session = create(stand.url)
    body = {"model": "m", "messages": [USER], "stream": True}
    with httpx.stream("POST", f"{session.base_url}/chat/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines.count(": keep-alive") >= 3
    assert lines[-1] == "data: [DONE]"
    assert '"role":"assistant"' in lines[0]
    stream = sdk(session).chat.completions.create(**body)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "abc"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_who_waits_for_an_answer_is_told_that_the_gateway_is_stopped(serve, path, stream):
    stand = serve([LONG], engine=SLOW)
    session = create(stand.url)
    body = {"model": "m", "max_tokens": 500, "messages": [USER], "stream": stream}
    answers: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{session.base_url}/{path}", json=body, timeout=30))
    )
    thread.start()
    until(lambda: stand.engine.in_flight == 1)
    time.sleep(0.2)
    stand.restart()
    thread.join(10)
    (answer,) = answers
    assert until(lambda: stand.engine.in_flight == 0) < 1.0
    if stream:
        error = orjson.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))["error"]
    else:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        error = answer.json()["error"]
    assert error["message"] == "The gateway is being stopped."
