"""Answering one turn over HTTP: streamed or whole, and given up as soon as the client is gone."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from titogym.gateway.errors import RequestError
from titogym.gateway.protocols.base import KEEP_ALIVE, Reply
from titogym.gateway.sessions.session import Session
from titogym.gateway.sessions.turn import Committed, Delta

KEEP_ALIVE_SECONDS = 10.0

ErrorBody = Callable[[RequestError], dict[str, Any]]


class TurnResponse(Response):
    """Runs a turn and writes its answer.

    The status line of a stream waits for the turn's first item, so that a refusal has its own status;
    after `KEEP_ALIVE_SECONDS` of silence it goes out, and comments keep the connection alive.
    """

    def __init__(
        self,
        items: AsyncGenerator[Delta | Committed],
        reply: Reply,
        session: Session,
        *,
        stream: bool,
        error_body: ErrorBody,
    ) -> None:
        self._items = items
        self._reply = reply
        self._session = session
        self._stream = stream
        self._error_body = error_body
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Stream(send) if self._stream else None
        work = asyncio.ensure_future(self._streamed(answer) if answer else self._whole(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        pulse = asyncio.ensure_future(self._pulse(answer)) if answer else None
        self._session.tasks.add(work)
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if pulse:
                pulse.cancel()
            left = not work.done()
            if left:
                work.cancel()
            try:
                await work
            except asyncio.CancelledError:
                if not left:  # the session was deleted under the turn
                    deleted = RequestError("The session was deleted.", status=404, code="session_not_found")
                    await self._fail(deleted, answer, send)
            except RequestError as error:
                await self._fail(error, answer, send)
        finally:
            for task in (work, gone, pulse):
                if task:
                    task.cancel()
            self._session.tasks.discard(work)

    async def _whole(self, send: Send) -> None:
        async with aclosing(self._items) as items:
            async for item in items:
                if isinstance(item, Committed):
                    body = self._reply.whole(item)
                    await Response(body, media_type="application/json")(_NO_SCOPE, _nothing, send)

    async def _streamed(self, answer: "_Stream") -> None:
        async with aclosing(self._items) as items:
            async for item in items:
                head = b"" if answer.started else self._reply.open()
                if isinstance(item, Committed):
                    await answer.write(head + self._reply.close(item), more=False)
                else:
                    await answer.write(head + self._reply.delta(item))

    async def _pulse(self, answer: "_Stream") -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            if time.monotonic() - answer.written >= KEEP_ALIVE_SECONDS:
                await answer.write(KEEP_ALIVE if answer.started else self._reply.open() + KEEP_ALIVE)

    async def _fail(self, error: RequestError, answer: "_Stream | None", send: Send) -> None:
        if answer is not None and answer.started:
            await answer.write(self._reply.failure(error), more=False)
        else:
            await error_response(error, self._error_body)(_NO_SCOPE, _nothing, send)


class _Stream:
    """A stream of server-sent events that starts with its first bytes."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._turn = asyncio.Lock()
        self.started = False
        self.written = time.monotonic()

    async def write(self, body: bytes, more: bool = True) -> None:
        start, self.started, self.written = not self.started, True, time.monotonic()
        async with self._turn:
            if start:
                message = {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}
                await self._send(message)
            if body or not more:
                await self._send({"type": "http.response.body", "body": body, "more_body": more})


_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def error_response(error: RequestError, body: ErrorBody) -> Response:
    # The SDKs of OpenAI and Anthropic would repeat every 409 and 429; this header tells them.
    headers = {"x-should-retry": "false"}
    if error.retry_after is not None:
        headers = {"x-should-retry": "true", "retry-after": f"{error.retry_after:g}"}
    return Response(orjson.dumps(body(error)), error.status, headers, "application/json")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_NO_SCOPE: Scope = {"type": "http"}


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}
