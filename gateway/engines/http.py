"""A small HTTP/1.1 client for engines, on asyncio's streams.

A turn with a long history is a request of half a megabyte and an answer of many small events. A general
client spends more time on these than the rest of the gateway on the whole turn, so this one does only what
inference servers need: keep-alive connections, bodies with a length or in chunks, TLS where the URL asks.
"""

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from titogym.errors import UserError

_HEAD_LIMIT = 1 << 16
_PIECE = 1 << 16
_CONNECT_SECONDS = 10.0

# What reading from a server that went away, or is none, raises.
_BROKEN = (OSError, EOFError, ValueError, LookupError, asyncio.LimitOverrunError, TimeoutError)


class HttpError(Exception):
    """The server cannot be reached, broke off, stayed silent for too long, or does not speak HTTP."""


@dataclass(slots=True, eq=False)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since: float = 0.0


class HttpClient:
    """One server. Any number of requests at a time, each with a connection of its own.

    `timeout` is how long the server may stay silent within a request, `keep_alive` how long an idle
    connection may be used again: shorter than the server keeps it, or a request could be sent into one
    that is just being closed. Both in seconds.
    """

    def __init__(self, url: str, *, timeout: float, keep_alive: float = 2.0) -> None:
        """Raises `UserError` for what is no http or https URL."""
        try:
            address = urlsplit(url)
            port = address.port
        except ValueError as error:
            raise UserError(f"Engine {url!r} is no URL: {error}.") from None
        if address.scheme not in ("http", "https") or not address.hostname:
            raise UserError(f"Engine {url!r} is no URL: it must begin with http:// or https://.")
        self._host = address.hostname
        self._tls = ssl.create_default_context() if address.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self._base = address.path.rstrip("/")
        self._netloc = address.netloc.rpartition("@")[2]
        self._timeout = timeout
        self._keep_alive = keep_alive
        self._idle: deque[_Connection] = deque()

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] = {},
        timeout: float | None = None,
    ) -> tuple[int, bytes]:
        """Status and body of the answer. Raises `HttpError`."""
        async with self.stream(method, path, body, headers=headers, timeout=timeout) as (status, pieces):
            return status, b"".join([piece async for piece in pieces])

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] = {},
        timeout: float | None = None,
    ) -> AsyncGenerator[tuple[int, AsyncIterator[bytes]]]:
        """Status of the answer, and its body as it arrives. Leaving early closes the connection.

        Raises `HttpError`, also while the body is read.
        """
        seconds = self._timeout if timeout is None else timeout
        connection = await self._connect(min(seconds, _CONNECT_SECONDS))
        whole = False
        try:
            head = [f"{method} {self._base}{path} HTTP/1.1", f"host: {self._netloc}"]
            head += [f"content-length: {len(body)}", "content-type: application/json"]
            head += [f"{name}: {value}" for name, value in headers.items()]
            try:
                async with asyncio.timeout(seconds):
                    connection.writer.write("\r\n".join([*head, "\r\n"]).encode("latin-1"))
                    if body:
                        connection.writer.write(body)
                    await connection.writer.drain()
                    status, answered = await _head(connection.reader)
            except _BROKEN as error:
                raise _failure(error) from error

            async def pieces() -> AsyncIterator[bytes]:
                nonlocal whole
                try:
                    async for piece in _body(connection.reader, answered, seconds):
                        yield piece
                except _BROKEN as error:
                    raise _failure(error) from error
                whole = answered.get("connection", "").lower() != "close"

            yield status, pieces()
        finally:
            if whole:
                connection.idle_since = time.monotonic()
                self._idle.append(connection)
            else:
                connection.writer.transport.abort()

    async def close(self) -> None:
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()

    async def _connect(self, seconds: float) -> _Connection:
        """The connection that was used last, if it is still good, or else a new one."""
        oldest = time.monotonic() - self._keep_alive
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.popleft().writer.close()
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.writer.close()
        try:
            async with asyncio.timeout(seconds):
                streams = await asyncio.open_connection(
                    self._host, self._port, ssl=self._tls, limit=_HEAD_LIMIT
                )
        except _BROKEN as error:
            raise _failure(error) from error
        return _Connection(*streams)


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer, names in lower case; interim answers are passed over."""
    while True:
        raw = await reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(f"this is no HTTP/1.1 server: {first[:80]!r}")
        status = int(rest[:3])
        pairs = (line.partition(":") for line in lines if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if status >= 200:
            return status, headers


async def _body(
    reader: asyncio.StreamReader, headers: dict[str, str], seconds: float
) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        buffer = bytearray()
        while True:
            piece, ended = _unchunked(buffer)
            if piece:
                yield piece
            if ended:
                return
            async with asyncio.timeout(seconds):
                read = await reader.read(_PIECE)
            if not read:
                raise EOFError
            buffer += read
    length = headers.get("content-length")
    missing = -1 if length is None else int(length)
    if length is None:  # the end of the connection is the end of the body
        headers["connection"] = "close"
    while missing:
        async with asyncio.timeout(seconds):
            piece = await reader.read(_PIECE if missing < 0 else min(missing, _PIECE))
        if not piece:
            if missing < 0:
                return
            raise EOFError
        missing -= len(piece) if missing > 0 else 0
        yield piece


def _unchunked(buffer: bytearray) -> tuple[bytes, bool]:
    """Take all whole chunks off the buffer: what they hold, and whether the body ends with them."""
    pieces, at, ended = [], 0, False
    while (line_end := buffer.find(b"\n", at)) >= 0:
        size = int(buffer[at:line_end].split(b";")[0], 16)
        start, end = line_end + 1, line_end + 1 + size
        if size < 0:
            raise ValueError("a chunk of less than nothing")
        if not size:
            ended = _after_trailers(buffer, start)
            break
        if len(buffer) < end + 2:  # a line end stands behind each chunk
            break
        pieces.append(buffer[start:end])
        at = end + 2
    else:
        if len(buffer) - at > _HEAD_LIMIT:
            raise ValueError("this is no chunk")
    del buffer[:at]
    return b"".join(pieces), ended


def _after_trailers(buffer: bytearray, at: int) -> bool:
    """Whether the empty line is there that ends the trailers, which begin at `at`; nothing may follow it."""
    while (line_end := buffer.find(b"\n", at)) >= 0:
        if not buffer[at:line_end].strip():
            if line_end + 1 < len(buffer):
                raise ValueError("more came than was asked for")
            return True
        at = line_end + 1
    return False


def _failure(error: BaseException) -> HttpError:
    if isinstance(error, TimeoutError):
        return HttpError("no answer in time")
    if isinstance(error, EOFError):
        return HttpError("the server closed the connection")
    return HttpError(str(error) or type(error).__name__)
