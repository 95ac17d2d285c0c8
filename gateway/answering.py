"""Answering one turn over HTTP: streamed or whole, and given up as soon as the client is gone."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from titogym.gateway.alias import alias
from titogym.gateway.errors import RequestError
from titogym.gateway.protocols.base import Reply
from titogym.gateway.sessions.turn import Committed, Delta, Items, Planned

KEEP_ALIVE_SECONDS = 10.0
_LOG = logging.getLogger("titogym.gateway")
_FAILURE = RequestError("The gateway failed; its log has the details.", status=500, code="internal_error")
_STOPPING = RequestError("The gateway is being stopped.", status=503, code="gateway_stopping", retry_after=1)

ErrorBody = Callable[[RequestError], dict[str, Any]]


class TurnResponse(Response):
    """Reads a turn and writes its answer.

    The status line of a stream waits for the turn's first tokens, so that a refusal has its own status;
    after `KEEP_ALIVE_SECONDS` of silence it goes out, and the protocol's pings keep the connection alive.
    """

    def __init__(
        self, items: Items, reply: Reply, *, stream: bool, error_body: ErrorBody, session: str
    ) -> None:
        self._session = session
        self._items = items
        self._reply = reply
        self._stream = stream
        self._error_body = error_body
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Stream(send) if self._stream else None
        work = asyncio.ensure_future(self._streamed(answer) if answer else self._whole(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        pulse = asyncio.ensure_future(self._pulse(answer)) if answer else None
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if pulse:
                pulse.cancel()
            if work.done():
                try:
                    work.result()
                except RequestError as error:
                    await self._fail(error, answer, send)
                except Exception:
                    fields = {"session": alias(self._session)}
                    _LOG.exception("turn_failed", extra={"fields": fields})
                    await self._fail(_FAILURE, answer, send)
        except asyncio.CancelledError:  # the server does not wait for us any longer
            work.cancel()
            if not _succeeded(work):
                await self._fail(_STOPPING, answer, send)
        finally:
            for task in (work, gone, pulse):
                if task:
                    task.cancel()
            await self._items.aclose()

    async def _whole(self, send: Send) -> None:
        async for item in self._items:
            if isinstance(item, Committed):
                body = self._reply.whole(item)
                await Response(body, media_type="application/json")(_NO_SCOPE, _nothing, send)

    async def _streamed(self, answer: "_Stream") -> None:
        async for item in self._items:
            if isinstance(item, Planned):
                self._reply.planned(item.prompt_tokens)
                continue
            head = b"" if answer.started else self._reply.open()
            if isinstance(item, Delta):
                await answer.write(head + self._reply.delta(item))
            else:
                await answer.write(head + self._reply.close(item), more=False)

    async def _pulse(self, answer: "_Stream") -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            if time.monotonic() - answer.written >= KEEP_ALIVE_SECONDS:
                head = b"" if answer.started else self._reply.open()
                await answer.write(head + self._reply.keep_alive)

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


def _succeeded(work: "asyncio.Future[None]") -> bool:
    return work.done() and not work.cancelled() and work.exception() is None


_NO_SCOPE: Scope = {"type": "http"}


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}
