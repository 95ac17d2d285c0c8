"""Carrying bytes between two connections."""

import asyncio

_CHUNK = 1 << 16


async def carry_both_ways(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Until both sides have ended, or one breaks. Closes the far one; the near one is the caller's."""
    try:
        async with asyncio.TaskGroup() as both_ways:
            both_ways.create_task(_carry(reader, far_writer))
            both_ways.create_task(_carry(far_reader, writer))
    except* OSError:
        pass  # one side broke off
    finally:
        far_writer.close()


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(_CHUNK):
        sink.write(data)
        await sink.drain()
    sink.write_eof()
