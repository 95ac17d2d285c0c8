"""Child processes that cannot outlive us.

Every long-lived child (engine, gateway, trainer) is started with `spawn`: it leads its own process
group, dies with its parent even when the parent is killed with SIGKILL (Linux `PR_SET_PDEATHSIG`),
and writes to a log whose last lines become the error message when it fails to start.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from titogym.errors import UserError

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to SIGKILL this process when its parent dies (no-op off Linux).

    `parent` is the expected parent's pid: if it is gone already, exit now (the signal was missed).
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os._exit(1)


def program() -> str:
    """How the person at the keyboard calls titogym: by name, or by path where it is not on the PATH."""
    by_path = Path(sys.argv[0]).name == "titogym" and shutil.which("titogym") is None
    return sys.argv[0] if by_path else "titogym"


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago. The caller's server must still handle a lost race."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@dataclass
class Child:
    """A running child process and its log."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def alive(self) -> bool:
        return self.process.poll() is None

    def log_tail(self, lines: int = 12) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").strip().splitlines()[-lines:])
        except OSError:
            return ""

    def ending(self) -> str:
        """How it ended, for a person: the status and the last lines of the log."""
        return (
            f"{self.name} stopped with status {self.process.returncode}; the end of {self.log}:\n"
            f"{self.log_tail()}"
        )

    def wait_ready(self, ready: Callable[[], bool], timeout: float, interval: float = 0.2) -> None:
        """Poll `ready` until it is true. Raises `UserError` with the log's tail on death or timeout (s)."""
        deadline = time.monotonic() + timeout
        while not ready():
            if not self.alive():
                raise UserError(
                    f"The {self.name} stopped with status {self.process.returncode} while starting; "
                    f"the end of {self.log}:\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                self.stop()
                raise UserError(
                    f"The {self.name} was not ready after {timeout:.0f} s; "
                    f"the end of {self.log}:\n{self.log_tail()}"
                )
            time.sleep(interval)

    def stop(self, grace: float = 5.0) -> None:
        """SIGTERM the process group, SIGKILL what is left after `grace` seconds. Safe to call twice."""
        if self.process.poll() is None:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
        self._signal(signal.SIGKILL)  # grandchildren that ignored SIGTERM
        self.process.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def spawn(
    name: str,
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start `command` in its own process group, bound to this process's life, logging to `log`.

    `env` is added to this process's environment; `pass_fds` stay open in the child. Call from the main
    thread: the kernel sends the parent-death signal when the *thread* that started the child ends.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    parent = os.getpid()
    with log.open("ab") as sink:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
            pass_fds=pass_fds,
            preexec_fn=lambda: die_with_parent(parent),
        )
    return Child(name, process, log)
