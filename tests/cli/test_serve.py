import asyncio
import socket

from titogym.cli.serve import _listen


async def test_an_answer_does_not_wait_until_its_beginning_is_acknowledged():
    """Nagle's algorithm is off on the connections of the listener that `titogym serve` opens."""
    accepted: asyncio.Future[asyncio.Transport] = asyncio.get_running_loop().create_future()

    class Served(asyncio.Protocol):
        def connection_made(self, transport):
            accepted.set_result(transport)

    server = await asyncio.get_running_loop().create_server(Served, sock=_listen("127.0.0.1", 0))
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        connection = (await accepted).get_extra_info("socket")
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
