"""Runs beside a sandbox, in a container that shares its network: carries connections to the driver.

The driver executes this file's text with the container's python3 and speaks with it over standard input and
output, in frames: connection (4 bytes), kind (1), length (4), payload.

    porter -> driver   READY; OPEN with the port (4 bytes) that was connected to; DATA; END
    driver -> porter   DATA; CLOSE: that was all

`argv[1:]` are the loopback ports to listen on.
"""

import asyncio
import struct
import sys

FRAME = struct.Struct(">IBI")
READY, OPEN, DATA, END, CLOSE = range(5)
CHUNK = 1 << 16


async def main() -> None:
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout)
    out = asyncio.StreamWriter(transport, protocol, None, loop)
    writers: dict[int, asyncio.StreamWriter] = {}
    count = 0

    def tell(connection: int, kind: int, payload: bytes = b"") -> None:
        out.write(FRAME.pack(connection, kind, len(payload)) + payload)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        connection = count
        writers[connection] = writer
        port = writer.get_extra_info("sockname")[1]
        tell(connection, OPEN, port.to_bytes(4, "big"))
        try:
            while data := await reader.read(CHUNK):
                tell(connection, DATA, data)
                await out.drain()
        except OSError:
            pass
        tell(connection, END)

    for port in sys.argv[1:]:
        await asyncio.start_server(serve, "127.0.0.1", int(port), backlog=128)
    tell(0, READY)
    while True:
        try:
            connection, kind, length = FRAME.unpack(await commands.readexactly(FRAME.size))
            payload = await commands.readexactly(length)
        except asyncio.IncompleteReadError:
            return  # the driver has gone
        writer = writers.get(connection)
        if writer is None:
            continue
        if kind == DATA:
            writer.write(payload)
        elif kind == CLOSE:
            writer.close()
            del writers[connection]


if __name__ == "__main__":
    asyncio.run(main())
