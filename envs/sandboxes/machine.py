"""One set of running namespaces: starting it, running commands inside, killing it.

Commands are started by process 1 inside (`init.py`), which is handed the ends of two pipes; this side
only reads them. One command costs a fork inside and ~0.3 ms here, however large the driver is.
"""

import asyncio
import fcntl
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

from titogym.envs.sandboxes.base import Output, SandboxError

START_SECONDS = 60.0  # bubblewrap and process 1 take ~20 ms; a busy machine may take its time
KILL_SECONDS = 5.0  # from asking process 1 to kill a command until the namespaces are killed instead
_PIPE_BYTES = 1 << 20
_DISCARD_INTERVAL = 0.01  # s between reads of output that nobody wants


@dataclass(frozen=True, slots=True)
class Outcome:
    """`status` is the wait status of the command's main process; `running` counts what it left running."""

    status: int
    running: int
    stdout: bytes
    stderr: bytes
    timed_out: bool
    truncated: bool


class Machine:
    """Running namespaces. Belongs to the event loop in which it was started."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        control: socket.socket,
        init: int,
        listeners: list[socket.socket],
    ) -> None:
        self.listeners = listeners  # one per `listen=` option, in their order; the caller closes them
        self._process = process
        self._control = control
        self._init = init  # pidfd of process 1
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[tuple[int, int]]] = {}
        self._overran: set[int] = set()
        self._pipes: set[_Pipe] = set()
        self._number = 0
        self.alive = True
        self._loop.add_reader(control.fileno(), self._receive)

    @classmethod
    async def start(
        cls,
        command: Callable[[list[str], int], list[str]],
        name: str,
        options: Sequence[str],
        *,
        log: Path,
        admit: Callable[[int], None],
    ) -> "Machine":
        """Start process 1. `command(arguments, info_fd)` is the line that builds namespaces around a Python
        interpreter with these arguments.

        `options` are those of `init.py`. `admit(pid)` is called with the pid of process 1 before any
        command can run. `log` takes what bubblewrap says; its end becomes the message of the
        `SandboxError` when nothing starts.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        info, info_writer = os.pipe2(os.O_CLOEXEC)
        program = _memory_file(_init_program())
        start = f"exec(open({program}).read())"  # keeps the text out of process lists
        inner = ["-I", "-S", "-c", start, str(theirs.fileno()), name, *options]
        try:
            with log.open("wb") as sink:
                process = subprocess.Popen(  # noqa: ASYNC220 (~2 ms; a thread's death would kill it)
                    command(inner, info_writer),
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    cwd="/",
                    pass_fds=(theirs.fileno(), info_writer, program),
                )
        except BaseException:
            ours.close()
            os.close(info)
            raise
        finally:
            theirs.close()
            os.close(info_writer)
            os.close(program)
        ours.setblocking(False)
        init = None
        try:
            async with asyncio.timeout(START_SECONDS):
                await _readable(ours.fileno())
            ready, descriptors, _, _ = socket.recv_fds(ours, 64, 16)
            listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
            if ready != b"ready":
                raise SandboxError(f"bubblewrap could not start the sandbox: {_tail(log)}")
            pid = json.loads(os.read(info, 65536))["child-pid"]
            init = os.pidfd_open(pid)
            admit(pid)
            return cls(process, ours, init, listeners)
        except BaseException as error:
            ours.close()
            if init is not None:
                os.close(init)
            process.kill()  # process 1 follows: it dies with its parent, and at the socket's end
            process.wait()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"The sandbox was not ready after {START_SECONDS:.0f} s.") from None
            raise
        finally:
            os.close(info)

    async def run(
        self,
        arguments: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        stdin: bytes,
        timeout: float | None,
        max_output: int,
        on_output: Output | None = None,
    ) -> Outcome:
        """Run one command to its end, or to its timeout (s); then its whole tree is killed.

        Keeps the first `max_output` bytes of each stream, and tells `on_output` of each piece that it keeps.
        Cancelling kills the tree as well.
        """
        if not self.alive:
            raise SandboxError("The sandbox is no longer running.")
        request = _request(arguments, cwd, env)
        self._number += 1
        number = self._number
        stdout, stderr = self._send(number, request, stdin, max_output, on_output)
        exited = self._waiting[number] = self._loop.create_future()
        alarm = None if timeout is None else self._loop.call_later(timeout, self._overrun, number)
        try:
            status, running = await exited
        except asyncio.CancelledError:
            self._send_kill(number)
            raise
        except SandboxError:
            if number not in self._overran:
                raise
            status, running = signal.SIGKILL, 0
        finally:
            if alarm is not None:
                alarm.cancel()
            self._waiting.pop(number, None)
            timed_out = number in self._overran
            self._overran.discard(number)
            stdout.release()
            stderr.release()
        truncated = stdout.truncated or stderr.truncated
        return Outcome(status, running, bytes(stdout.data), bytes(stderr.data), timed_out, truncated)

    async def kill(self) -> None:
        """Kill every process inside and wait until the kernel has buried the last. Safe to call twice.

        Raises `SandboxError` if they are not gone after a while.
        """
        self._kill_init()
        # The outer process ends when process 1 is reaped, and that is after all others in its namespace.
        if self._process.returncode is None and not await _ended(self._process.pid, KILL_SECONDS):
            raise SandboxError(f"Process {self._process.pid} of the sandbox would not die.")
        self._process.wait()
        self._close()

    def _overrun(self, number: int) -> None:
        """The command's time is over: process 1 kills its tree, or is killed with everything inside."""
        self._overran.add(number)
        self._send_kill(number)
        self._loop.call_later(KILL_SECONDS, lambda: self._kill_init() if number in self._waiting else None)

    def _kill_init(self) -> None:
        if self.alive:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init, signal.SIGKILL)

    def _send(
        self, number: int, request: bytes, stdin: bytes, cap: int, on_output: Output | None
    ) -> "tuple[_Pipe, _Pipe]":
        opened: list[int] = []  # those that process 1 gets
        pipes: list[_Pipe] = []
        try:
            opened.append(_memory_file(request))
            opened.append(_memory_file(stdin) if stdin else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            names: tuple[Literal["stdout", "stderr"], ...] = ("stdout", "stderr")
            for name in names:
                reader, writer = os.pipe2(os.O_CLOEXEC)
                opened.append(writer)
                tell = partial(on_output, name) if on_output else None
                pipes.append(_Pipe(self._loop, reader, cap, self._pipes, tell))
            socket.send_fds(self._control, [b"run %d" % number], opened)
        except OSError as error:
            for pipe in pipes:
                pipe.close()
            raise SandboxError(f"The sandbox does not take commands: {error}") from error
        finally:
            for descriptor in opened:
                os.close(descriptor)
        return pipes[0], pipes[1]

    def _send_kill(self, number: int) -> None:
        with suppress(OSError):
            self._control.send(b"kill %d" % number)

    def _receive(self) -> None:
        try:
            message = self._control.recv(64)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        verb, *numbers = message.split() or [b""]
        if verb == b"exit" and len(numbers) == 3 and all(word.isdigit() for word in numbers):
            number, status, running = map(int, numbers)
            exited = self._waiting.pop(number, None)
            if exited is not None and not exited.done():
                exited.set_result((status, running))
        else:  # the end of file, or an agent that speaks for process 1
            self._close()

    def _close(self) -> None:
        if not self.alive:
            return
        self._kill_init()
        self.alive = False
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        for exited in self._waiting.values():
            if not exited.done():
                exited.set_exception(SandboxError("The sandbox died while the command ran."))
                exited.exception()  # a command that was cancelled will not ask for it
        self._waiting.clear()
        for pipe in list(self._pipes):
            pipe.close()
        os.close(self._init)


class _Pipe:
    """The reading end of a command's output: keeps the first `cap` bytes, discards the rest slowly.

    After `release` it goes on discarding what background processes write, so that they do not die of
    a broken pipe, until the last of them closes its end.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fd: int,
        cap: int,
        registry: "set[_Pipe]",
        tell: Callable[[bytes], None] | None,
    ) -> None:
        self.data = bytearray()
        self.truncated = False
        self._loop, self._fd, self._cap, self._registry = loop, fd, cap, registry
        self._tell = tell
        self._released = False
        self._open = True
        os.set_blocking(fd, False)
        registry.add(self)
        loop.add_reader(fd, self._readable)

    def release(self) -> None:
        """The command has ended: take what it left in the pipe, then stop keeping."""
        while self._open and not self.truncated and self._read():
            pass
        self._released = True

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._registry.discard(self)

    def _readable(self) -> None:
        self._read()
        if self._open and (self.truncated or self._released):
            self._loop.remove_reader(self._fd)
            self._loop.call_later(_DISCARD_INTERVAL, self._resume)

    def _resume(self) -> None:
        if self._open:
            self._loop.add_reader(self._fd, self._readable)

    def _read(self) -> bool:
        """Take one piece. False when there is none now."""
        try:
            piece = os.read(self._fd, _PIPE_BYTES)
        except BlockingIOError:
            return False
        if not piece:
            self.close()
            return False
        if self._released:
            return True
        if self._tell is not None and (kept := piece[: self._cap - len(self.data)]):
            self._tell(kept)
        self.data += piece
        if len(self.data) > self._cap:
            del self.data[self._cap :]
            if not self.truncated:  # let a flood pass in few, large pieces
                with suppress(OSError):
                    fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            self.truncated = True
        return True


def _request(arguments: Sequence[str], cwd: str, env: Mapping[str, str]) -> bytes:
    fields = [cwd, str(len(arguments)), *arguments, *(f"{name}={value}" for name, value in env.items())]
    if any("\0" in field for field in fields):
        raise ValueError("a command, a directory or an environment variable holds a NUL character")
    return b"\0".join(os.fsencode(field) for field in fields)


def _memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("titogym")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


async def _ended(pid: int, timeout: float) -> bool:
    """Wait until our child `pid` has ended (it is not reaped). False when `timeout` (s) is over."""
    descriptor = os.pidfd_open(pid)
    try:
        async with asyncio.timeout(timeout):
            await _readable(descriptor)
    except TimeoutError:
        return False
    finally:
        os.close(descriptor)
    return True


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-500:] or "it said nothing"


@cache
def _init_program() -> bytes:
    return Path(__file__).with_name("init.py").read_bytes()
