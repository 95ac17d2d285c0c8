"""Loopback ports of a container, served by the driver.

Where the driver is root beside the engine, it opens them itself, from outside (`namespaces`). Elsewhere
(a user in the group `docker`, a rootless engine, one on another machine) a small container that shares the
sandbox's network does, and carries what is connected over the engine's own connection (`porter`).
"""

import asyncio
import logging
import socket
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from titogym.envs.sandboxes.base import SandboxError, Unsupported
from titogym.envs.sandboxes.docker import commands, porter
from titogym.envs.sandboxes.docker.engine import Engine, EngineError
from titogym.envs.sandboxes.docker.namespaces import listen_inside
from titogym.envs.sandboxes.doors import MOST_CONNECTIONS, Door, Serve

log = logging.getLogger(__name__)

_READY_SECONDS = 60.0
_MEMORY = 128 << 20
_PROCESSES = 32


class Ports(Protocol):
    """Open ports. `close` is safe to call twice."""

    async def close(self) -> None: ...


async def open_ports(
    engine: Engine,
    container: str,
    pid: int,
    serving: Mapping[int, Serve],
    *,
    image: str,
    labels: Mapping[str, str],
) -> Ports:
    """Serve these loopback ports of the running `container`, whose first process is `pid`.

    `image` has a python3 for the porter, which bears `labels`. Raises `SandboxError`.
    """
    if engine.here:
        with suppress(Unsupported):
            listeners = await asyncio.to_thread(listen_inside, pid, list(serving))
            return _Outside([Door(*pair) for pair in zip(listeners, serving.values(), strict=True)])
    ports = _Porter(engine, serving)
    try:
        await ports.start(container, image, labels)
    except BaseException:
        await ports.close()
        raise
    return ports


class _Outside:
    """Sockets that were opened from here."""

    def __init__(self, doors: list[Door]) -> None:
        self._doors = doors
        for door in doors:
            door.open()

    async def close(self) -> None:
        for door in self._doors:
            door.close()


class _Porter:
    """A container beside the sandbox."""

    def __init__(self, engine: Engine, serving: Mapping[int, Serve]) -> None:
        self._engine = engine
        self._serving = serving
        self._container: str | None = None
        self._running: commands.Running | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._towards: dict[int, asyncio.StreamWriter] = {}  # connection -> where its data goes
        self._ready = asyncio.Event()
        self._sending = asyncio.Lock()

    async def start(self, container: str, image: str, labels: Mapping[str, str]) -> None:
        await self._engine.call(self._create, container, image, labels)
        assert self._container is not None
        line = ["python3", "-I", "-c", _program(), *map(str, self._serving)]
        self._running = await commands.start(self._engine, self._container, line, cwd="/", env={}, stdin=True)
        listening = self._spawn(self._listen(self._running))
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait({listening, ready}, timeout=_READY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not self._ready.is_set():
            raise SandboxError(
                "The ports of the sandbox could not be opened: the container beside it needs an image with a "
                f"python3, which {image!r} is not (option `image` of the docker sandbox)."
            )

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._running is not None:
            self._running.close()
        container, self._container = self._container, None
        if container is not None:
            try:
                await self._engine.call(self._engine.api.remove_container, container, force=True, v=True)
            except EngineError as error:  # it bears the sandbox's labels, and goes with it at the latest
                log.info("a container beside a sandbox was not removed: %s", error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _listen(self, running: commands.Running) -> None:
        pending = bytearray()
        async for name, piece in running.pieces():
            if name == "stderr":
                log.debug("beside a sandbox: %s", piece)
                continue
            pending += piece
            while len(pending) >= porter.FRAME.size:
                connection, kind, length = porter.FRAME.unpack_from(pending)
                end = porter.FRAME.size + length
                if len(pending) < end:
                    break
                payload = bytes(pending[porter.FRAME.size : end])
                del pending[:end]
                await self._take(connection, kind, payload)

    async def _take(self, connection: int, kind: int, payload: bytes) -> None:
        if kind == porter.READY:
            self._ready.set()
        elif kind == porter.OPEN and len(self._towards) >= MOST_CONNECTIONS:
            await self._send(connection, porter.CLOSE)
        elif kind == porter.OPEN:
            ours, theirs = socket.socketpair()
            reader, self._towards[connection] = await asyncio.open_connection(sock=ours, limit=porter.CHUNK)
            self._spawn(self._serve(theirs, self._serving[int.from_bytes(payload, "big")]))
            self._spawn(self._return(connection, reader))
        elif writer := self._towards.get(connection):
            with suppress(OSError):
                if kind == porter.DATA:
                    writer.write(payload)
                    await writer.drain()
                elif kind == porter.END:
                    writer.write_eof()

    async def _serve(self, theirs: socket.socket, serve: Serve) -> None:
        reader, writer = await asyncio.open_connection(sock=theirs, limit=porter.CHUNK)
        try:
            with suppress(OSError):
                await serve(reader, writer)
        finally:
            writer.close()

    async def _return(self, connection: int, reader: asyncio.StreamReader) -> None:
        """Carry what `serve` answers back to the sandbox."""
        try:
            with suppress(OSError):
                while data := await reader.read(porter.CHUNK):
                    await self._send(connection, porter.DATA, data)
                await self._send(connection, porter.CLOSE)
        finally:
            self._towards.pop(connection).close()

    async def _send(self, connection: int, kind: int, payload: bytes = b"") -> None:
        assert self._running is not None
        async with self._sending:
            await self._running.write(porter.FRAME.pack(connection, kind, len(payload)) + payload)

    def _create(self, container: str, image: str, labels: Mapping[str, str]) -> str:
        api = self._engine.api
        host = api.create_host_config(
            init=True,
            network_mode=f"container:{container}",
            mem_limit=_MEMORY,
            pids_limit=_PROCESSES,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
        )
        made = api.create_container(
            image,
            entrypoint=["sleep", "2147483647"],
            command=[],
            labels=dict(labels),
            host_config=host,
            use_config_proxy=False,
        )
        self._container = str(made["Id"])
        api.start(self._container)
        return self._container


@cache
def _program() -> str:
    return Path(porter.__file__).read_text()
