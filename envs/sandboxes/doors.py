"""Ways out of a sandbox without network: connections to a loopback port inside, served by the driver.

The listening socket was made inside, so it belongs to the sandbox's network namespace; accepting on it
needs no namespace at all. Thus its other end is here, in the driver, where the agent cannot touch it,
and the sandbox itself keeps no route to anything.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from titogym.envs.sandboxes.base import SandboxSpec, Unsupported
from titogym.envs.sandboxes.proxy import PROXY_PORT, proxy_for
from titogym.envs.sandboxes.streams import carry_both_ways
from titogym.envs.task import AllowList

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

MOST_CONNECTIONS = 64  # at once to one port: each takes descriptors of the driver, which others need too

_CHUNK = 1 << 16
_RETRY = 0.1  # s


def doors_of(spec: SandboxSpec) -> dict[int, Serve]:
    """The loopback ports of a sandbox, each with what it leads to: services, and an allow-list's proxy."""
    doors = {port: _leading_to(address) for port, address in spec.services.items()}
    if isinstance(spec.network, AllowList):
        if PROXY_PORT in doors:
            raise Unsupported(f"Port {PROXY_PORT} of a sandbox is its proxy's: give the service another one.")
        doors[PROXY_PORT] = proxy_for(spec.network)
    return doors


def environment_of(spec: SandboxSpec) -> Mapping[str, str]:
    """The variables by which programs inside find the proxy of an allow-list; empty without one."""
    if not isinstance(spec.network, AllowList):
        return {}
    url, own = f"http://127.0.0.1:{PROXY_PORT}", "127.0.0.1,localhost,::1"
    names = {"http_proxy": url, "https_proxy": url, "no_proxy": own}
    return {**names, **{name.upper(): value for name, value in names.items()}}


class Door:
    """Serves each connection that arrives on `listener`; those beyond `MOST_CONNECTIONS` wait."""

    def __init__(self, listener: socket.socket, serve: Serve) -> None:
        self._listener = listener
        self._serve = serve
        self._connections: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._free = asyncio.Semaphore(MOST_CONNECTIONS)

    def open(self) -> None:
        self._listener.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())
        # Not before the loop has forgotten the descriptor: its number may be taken again at once.
        self._accepting.add_done_callback(lambda _: self._listener.close())

    def close(self) -> None:
        """Stop listening and cut every connection. Safe to call twice."""
        if self._accepting is not None:
            self._accepting.cancel()
        for task in self._connections:
            task.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._free.acquire()
            while True:
                try:
                    inside, _ = await loop.sock_accept(self._listener)
                    break
                except OSError:  # no descriptor is free just now
                    await asyncio.sleep(_RETRY)
            task = loop.create_task(self._serve_one(inside))
            self._connections.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, connection: "asyncio.Task[None]") -> None:
        self._connections.discard(connection)
        self._free.release()

    async def _serve_one(self, inside: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=inside, limit=_CHUNK)
        try:
            with suppress(OSError):  # one end is gone: the client sees its connection close
                await self._serve(reader, writer)
        finally:
            writer.close()


def _leading_to(address: str) -> Serve:
    """Carries a connection to `address` ("host:port")."""
    host, _, port = address.rpartition(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=_CHUNK)
        await carry_both_ways(reader, writer, far_reader, far_writer)

    return serve
