"""Ranks of one machine as child processes over pipes: rank 0 of the driver, the others of rank 0."""

import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from titogym import processes
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.ranks import Member

WORKER = "titogym.trainer.backends.worker"
_LAST_WORDS = 15.0  # seconds between the pipe's end and the process's, after which it is ended


class Spawned:
    """A `process.Link` to a child process that starts at once and dies with this one, even by SIGKILL.

    Create it in the main thread.
    """

    def __init__(self, spec: BackendSpec, log: Path) -> None:
        self._child, self._connection = _start("trainer", log, [str(log)], thread_settings(spec))
        with suppress(OSError):  # a child that has died already is noticed at the first call
            self._connection.send((spec, {}))

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def output(self) -> str:
        return str(self._child.log)

    def connection(self) -> Connection:
        return self._connection

    def alive(self) -> bool:
        return self._child.alive()

    def ending(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._child.process.wait(_LAST_WORDS)
        self._child.stop()
        return f"The trainer process {_how_ended(self._child)}"

    def stop(self, lost: bool = False) -> None:
        self._child.stop()
        self._connection.close()


def children(world: int, log: Path) -> dict[int, Member]:
    """Ranks 1, 2, ... with their logs beside `log`. Call from the main thread of rank 0."""
    members = {}
    for rank in range(1, world):
        beside = log.with_name(f"{log.stem}-rank{rank}{log.suffix}")
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        child, connection = _start(f"trainer rank {rank}", beside, [], own)
        members[rank] = Member(connection, partial(_rank_ending, rank, child))
    return members


def thread_settings(spec: BackendSpec) -> dict[str, str]:
    """Threads that wait must not spin: engine, gateway and sandboxes share the cores with the trainer."""
    settings = {"OMP_WAIT_POLICY": "PASSIVE"}
    if spec.threads is not None:
        settings["OMP_NUM_THREADS"] = str(spec.threads)
    return settings


def _start(
    name: str, log: Path, arguments: Sequence[str], env: Mapping[str, str]
) -> tuple[processes.Child, Connection]:
    ours, theirs = socket.socketpair()
    with theirs:
        child = processes.spawn(
            name,
            [sys.executable, "-m", WORKER, "pipe", str(theirs.fileno()), *arguments],
            log=log,
            env=env,
            pass_fds=[theirs.fileno()],
        )
    return child, Connection(ours.detach())


def _rank_ending(rank: int, child: processes.Child) -> str:
    with suppress(subprocess.TimeoutExpired):
        child.process.wait(2)
    return f"rank {rank} {_how_ended(child)}"


def _how_ended(child: processes.Child) -> str:
    status = child.process.returncode
    if status is None:
        how = "closed its pipe"
    elif status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
    else:
        how = f"ended with status {status}"
    return f"{how}; the end of {child.log}:\n{child.log_tail()}"
