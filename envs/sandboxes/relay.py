"""Ways out of a sandbox without network: connections to a loopback port inside, carried to one address.

The listening socket was made inside, so it belongs to the sandbox's network namespace; accepting on it
needs no namespace at all. Thus the relay runs here, in the driver, where the agent cannot touch it,
and the sandbox itself keeps no route to anything.
"""

import asyncio
import socket

_CHUNK = 1 << 16
_RETRY = 0.1  # s


class Relay:
    """Carries each connection that arrives on `listener` to `address` ("host:port")."""

    def __init__(self, listener: socket.socket, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._listener = listener
        self._host, self._port = host.strip("[]"), int(port)
        self._connections: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
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
            try:
                inside, _ = await loop.sock_accept(self._listener)
            except OSError:  # no descriptor is free just now
                await asyncio.sleep(_RETRY)
                continue
            task = loop.create_task(self._serve(inside))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, inside: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=inside, limit=_CHUNK)
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port, limit=_CHUNK)
            try:
                async with asyncio.TaskGroup() as both_ways:
                    both_ways.create_task(_carry(reader, far_writer))
                    both_ways.create_task(_carry(far_reader, writer))
            finally:
                far_writer.close()
        except* OSError:
            pass  # the service is gone, or one end closed early: the client sees its connection close
        finally:
            writer.close()


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(_CHUNK):
        sink.write(data)
        await sink.drain()
    sink.write_eof()
