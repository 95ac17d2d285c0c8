"""Commands in a container: their output as it comes, their end, and the end of all that they started.

The connection that carries a command's output is handed from the SDK to the event loop, so a command
that runs for an hour occupies no thread.
"""

import asyncio
import secrets
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from titogym.envs.sandboxes.base import Output
from titogym.envs.sandboxes.docker.engine import Engine

MARK = "TITOGYM_COMMAND"  # variable by which the processes of one command are known
MAIN = "main"  # its value for the process that keeps the container alive
_STREAMS: dict[int, Literal["stdout", "stderr"]] = {1: "stdout", 2: "stderr"}
_HEADER = struct.Struct(">BxxxL")
_CHUNK = 1 << 18
_DISCARD_INTERVAL = 0.01  # s between reads of output that nobody wants
_KILL_SCRIPT_SECONDS = 10.0

# bash where the image has it, as people expect of a shell line.
SHELL = ("/bin/sh", "-c", 'test -x /bin/bash && exec /bin/bash -c "$1"; exec /bin/sh -c "$1"', "sh")

# Stops a command's processes until no new one is found, then kills them. They are known by the mark in their
# environment and by descent; where they have shed both, they are orphans that began after the command did
# and show no mark. Runs in any image that has sh and grep, without a right that the agent lacks: the agent
# may have put programs of its own in their place.
KILL_SCRIPT = r"""
facts() { # of the process in $1: its state, parent and start
  line=
  while read -r part || test -n "$part"; do line="$line $part"; done <"$1/stat" || return 1
  set -- ${line##*) }
  state=$1 parent=$2 start=${20}
  test -n "$start"
}
begun=
for directory in /proc/[0-9]*; do
  grep -q "MARK=$1" "$directory/environ" && facts "$directory" || continue
  if test -z "$begun" || test "$start" -lt "$begun"; then begun=$start; fi
done
seen=' '
for round in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do
  new=
  for directory in /proc/[0-9]*; do
    pid=${directory#/proc/}
    test "$pid" != 1 && test "$pid" != $$ || continue
    case $seen in *" $pid "*) continue ;; esac
    facts "$directory" && test "$state" != Z && test "$parent" != $$ || continue
    ours=
    case $seen in *" $parent "*) ours=1 ;; esac
    if test -n "$ours" || grep -q "MARK=$1" "$directory/environ"; then ours=1
    elif test "$parent" -le 1 && test "$start" -ge "${begun:-0}" && ! grep -q 'MARK=' "$directory/environ"
    then ours=1
    fi
    if test -n "$ours"; then kill -STOP "$pid"; seen="$seen$pid "; new=1; fi
  done
  test -z "$new" && break
done
for pid in $seen; do kill -KILL "$pid"; done
""".replace("MARK", MARK)


@dataclass(slots=True)
class Captured:
    """The first `cap` bytes of each stream of a command."""

    cap: int
    on_output: Output | None = None
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    truncated: bool = False

    def take(self, name: Literal["stdout", "stderr"], piece: bytes) -> None:
        into = self.stdout if name == "stdout" else self.stderr
        kept = piece[: self.cap - len(into)]
        self.truncated = self.truncated or len(kept) < len(piece)
        if kept:
            into += kept
            if self.on_output is not None:
                self.on_output(name, kept)


class Running:
    """A command that has been started, with the connection that carries its input and output."""

    def __init__(self, execution: str, mark: str, connection: Any) -> None:
        self.execution = execution  # the engine's id of it
        self.mark = mark
        self._response = connection._response
        self._socket = connection._sock
        self._leading = b""
        if not isinstance(self._socket, ssl.SSLSocket):
            self._socket.setblocking(False)
            self._leading = self._buffered()

    async def communicate(self, stdin: bytes | None, captured: Captured) -> None:
        """Write `stdin` and read all output until the command ends."""
        async with asyncio.TaskGroup() as both_ways:
            if stdin is not None:
                both_ways.create_task(self._feed(stdin))
            both_ways.create_task(self._capture(captured))

    async def write(self, data: bytes) -> None:
        """Hand `data` to the command. Raises `OSError` when it reads no more."""
        if isinstance(self._socket, ssl.SSLSocket):
            await asyncio.to_thread(self._socket.sendall, data)
        else:
            await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def pieces(self) -> AsyncIterator[tuple[Literal["stdout", "stderr"], bytes]]:
        """The command's output as it comes, until it ends."""
        pending = bytearray(self._leading)
        while True:
            while len(pending) >= _HEADER.size:
                kind, length = _HEADER.unpack_from(pending)
                if len(pending) < _HEADER.size + length:
                    break
                if kind in _STREAMS:
                    yield _STREAMS[kind], bytes(pending[_HEADER.size : _HEADER.size + length])
                del pending[: _HEADER.size + length]
            try:
                piece = await self._receive()
            except OSError:
                return
            if not piece:
                return
            pending += piece

    def close(self) -> None:
        self._socket.close()
        self._response.close()

    def _buffered(self) -> bytes:
        """What came together with the answer's head and lies in the HTTP client's buffer."""
        file = self._response.raw._fp.fp
        return bytes(file.read1(len(file.peek())) or b"") if file.peek() else b""

    async def _feed(self, stdin: bytes) -> None:
        try:
            await self.write(stdin)
            if not isinstance(self._socket, ssl.SSLSocket):
                self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the command does not want it

    async def _capture(self, captured: Captured) -> None:
        async for name, piece in self.pieces():
            captured.take(name, piece)
            if captured.truncated:  # let a flood pass slowly
                await asyncio.sleep(_DISCARD_INTERVAL)

    async def _receive(self) -> bytes:
        if isinstance(self._socket, ssl.SSLSocket):
            return await asyncio.to_thread(self._socket.recv, _CHUNK)
        return await asyncio.get_running_loop().sock_recv(self._socket, _CHUNK)


async def start(
    engine: Engine,
    container: str,
    arguments: Sequence[str],
    *,
    cwd: str | None,
    env: Mapping[str, str],
    stdin: bool,
) -> Running:
    """Start a command. Raises `EngineError`; its status is 409 where the container does not run."""
    mark = secrets.token_hex(8)

    def begin() -> Running:
        api = engine.api
        execution = api.exec_create(
            container, list(arguments), stdin=stdin, workdir=cwd, environment={**env, MARK: mark}
        )["Id"]
        return Running(execution, mark, api.exec_start(execution, socket=True))

    return await engine.call(begin)


async def kill(engine: Engine, container: str, mark: str) -> None:
    """Kill the command of this mark and all that it started. Raises `EngineError`, `TimeoutError`."""

    def begin() -> Running:
        api = engine.api
        line = ["/bin/sh", "-c", KILL_SCRIPT, "sh", mark]
        execution = api.exec_create(container, line, user="0", environment={MARK: "kill"})
        return Running(execution["Id"], "kill", api.exec_start(execution["Id"], socket=True))

    running = await engine.call(begin)
    try:
        async with asyncio.timeout(_KILL_SCRIPT_SECONDS):
            await running.communicate(None, Captured(0))
    finally:
        running.close()
