"""Trainers whose ranks torchrun starts: the driver's own on this machine, the user's on several.

The driver listens; the ranks come to it (`joining`). Once it has met all of them, rank 0 takes its calls from
the driver, and the others theirs from rank 0, as if they were child processes.
"""

import os
import queue
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from titogym import processes
from titogym.errors import UserError
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.joining import FAREWELL
from titogym.trainer.backends.meeting import Door, Hello, format_address, parse_address
from titogym.trainer.backends.process import TrainerError, TrainerGone
from titogym.trainer.backends.spawn import WORKER, thread_settings
from titogym.trainer.config.sections import TrainerSection

_LOOK = 0.2  # seconds between two looks at what else may have happened
_LAST_WORDS = 10.0  # seconds for torchrun to end after its ranks


class Torchrun:
    """Where the ranks of one run come to, as often as its trainer is replaced."""

    def __init__(self, settings: TrainerSection, key_file: Path, max_restarts: int) -> None:
        """Listen at `settings.driver_address`, with a new key in `key_file`. Raises `UserError`."""
        key = secrets.token_hex(32).encode()
        here = ("127.0.0.1", 0)
        address = parse_address(settings.driver_address) if settings.driver_address is not None else here
        try:
            self._door = Door(address, key)
        except OSError as error:
            raise UserError(
                f"Cannot listen at trainer.driver_address = {settings.driver_address!r} "
                f"({error.strerror or error}): name an address of this machine and a free port."
            ) from None
        self._settings = settings
        self._max_restarts = max_restarts
        self._key_file = key_file.absolute()
        self._key_file.unlink(missing_ok=True)
        with open(self._key_file, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
            out.write(key)
        self._port = processes.free_port("")  # for the torchruns of several nodes to meet at
        self._announced = False

    def start(self, spec: BackendSpec, log: Path, report: Callable[[str], None]) -> "TorchrunTrainer":
        """Start the ranks, or tell the user how. Call from the main thread."""
        child = None
        if self._settings.nodes == 1:
            child = processes.spawn("trainer", self._command(spec), log=log, env=thread_settings(spec))
        elif not self._announced:
            report(self._instructions(spec))
            self._announced = True
        else:
            report("Waiting for torchrun to start the trainer's ranks again")
        return TorchrunTrainer(self._door, spec, self._settings.start_timeout, child)

    def close(self) -> None:
        self._door.close()
        self._key_file.unlink(missing_ok=True)

    def _instructions(self, spec: BackendSpec) -> str:
        nodes, world = self._settings.nodes, spec.layout.world
        variables = shlex.join(f"{name}={value}" for name, value in thread_settings(spec).items())
        lines = [
            f"cd {shlex.quote(os.getcwd())} && {variables} {shlex.join(self._command(spec, node))}"
            for node in range(nodes)
        ]
        return "\n".join(
            [
                f"Start {world // nodes} of the trainer's {world} ranks on each of {nodes} nodes, within "
                f"{self._settings.start_timeout:g} s. Node 0 is this machine; for another one, change "
                "--master-addr to its address. The commands of nodes 0, 1, ...:",
                *lines,
            ]
        )

    def _command(self, spec: BackendSpec, node: int = 0) -> Sequence[str]:
        settings, (host, _) = self._settings, self._door.address
        if settings.nodes == 1:
            meet = ["--standalone", "--local-addr", "127.0.0.1", "--max-restarts", "0"]
        else:
            meet = ["--nnodes", str(settings.nodes), "--node-rank", str(node)]
            meet += ["--master-addr", host, "--master-port", str(self._port)]
            meet += ["--max-restarts", str(self._max_restarts)]
        driver = [format_address(self._door.address), str(self._key_file), f"{settings.start_timeout:g}"]
        return [
            *(sys.executable, "-m", "torch.distributed.run", *meet),
            *("--nproc-per-node", str(spec.layout.world // settings.nodes)),
            *("-m", WORKER, "join", *driver),
        ]


class TorchrunTrainer:
    """A `process.Link` to ranks that come by themselves. `child` is their torchrun, if it is the driver's."""

    def __init__(self, door: Door, spec: BackendSpec, patience: float, child: processes.Child | None) -> None:
        self._door = door
        self._spec = spec
        self._patience = patience
        self._child = child
        self._lives: dict[int, tuple[Hello, Connection]] = {}
        self._calls: Connection | None = None
        self._lost: list[str] = []  # the ranks that ended first
        self._stopped = threading.Event()
        self._meeting = threading.Lock()  # who holds it may change what was met
        self._watch = threading.Thread(target=self._watch_ranks, daemon=True)

    @property
    def pid(self) -> int:
        """Of rank 0, on its machine, once there."""
        return self._lives[0][0].pid

    @property
    def output(self) -> str:
        return str(self._child.log) if self._child is not None else "the output of torchrun"

    def connection(self) -> Connection:
        """Raises `TrainerError` when the ranks do not come, `TrainerGone` when one goes again."""
        with self._meeting:
            if self._calls is None:
                self._calls = self._meet()
                self._watch.start()
                with suppress(OSError):  # a rank that has died already is noticed at the first call
                    self._calls.send((self._spec, {}))
            return self._calls

    def alive(self) -> bool:
        if self._calls is None:
            return self._child is None or self._child.alive()
        return not self._lost

    def ending(self) -> str:
        if self._watch.is_alive():
            self._watch.join(_LAST_WORDS)
        self._lost = self._lost or ["its connection to rank 0"]
        said = f"The trainer lost {' and '.join(self._lost)}"
        if self._child is None:
            return f"{said}; more is in {self.output}."
        self._await_end(self._child)
        return f"{said}; the end of {self._child.log}:\n{self._child.log_tail()}"

    def stop(self, lost: bool = False) -> None:
        self._stopped.set()
        with self._meeting:
            lives = [life for _, life in self._lives.values() if not life.closed]
            if not lost and not self._lost:
                for life in lives:
                    with suppress(OSError):
                        life.send(FAREWELL)
            if self._watch.is_alive():
                self._watch.join()  # what is being waited on does not close
            for life in lives:
                life.close()
            if self._child is not None:
                if lives:
                    self._await_end(self._child)
                self._child.stop()
            if self._calls is not None:
                self._calls.close()

    def _meet(self) -> Connection:
        """Wait for every rank, then tell each where its calls come from, and for rank 0 to come for them."""
        deadline = time.monotonic() + self._patience
        first: Hello | None = None  # rank 0, once all are there
        while True:
            self._check(deadline)
            with suppress(queue.Empty):
                hello, connection = self._door.arrivals.get(timeout=_LOOK)
                if hello.line == "life":
                    self._check_world(hello)
                    self._lives[hello.rank] = hello, connection
                elif first is not None and (hello.host, hello.pid) == (first.host, first.pid):
                    return connection
            for rank in [rank for rank, (_, life) in self._lives.items() if life.poll()]:
                hello, life = self._lives.pop(rank)
                life.close()
                if first is not None:
                    self._lost = [str(hello)]
                    raise TrainerGone(f"The trainer lost {hello} before it began; see {self.output}.")
            if first is None and len(self._lives) == self._spec.layout.world:
                first = self._lives[0][0]
                for rank, (_, life) in self._lives.items():
                    with suppress(OSError):  # it has just gone
                        life.send(first.team if rank else self._door.address)

    def _check(self, deadline: float) -> None:
        if self._stopped.is_set():
            raise TrainerGone("The trainer was stopped while its ranks started.")
        if self._child is not None and not self._child.alive():
            raise TrainerGone(self._child.ending())
        if time.monotonic() > deadline:
            missing = sorted(set(range(self._spec.layout.world)) - self._lives.keys()) or [0]
            raise TrainerError(
                f"Rank {', '.join(map(str, missing))} of the trainer has not come to "
                f"{format_address(self._door.address)} in {self._patience:g} s: see {self.output}, start "
                "what is missing, or raise trainer.start_timeout."
            )

    def _check_world(self, hello: Hello) -> None:
        if hello.world != self._spec.layout.world:
            raise TrainerError(
                f"torchrun on {hello.host} starts {hello.world} ranks, and the layout {self._spec.layout} "
                f"has {self._spec.layout.world}: start it with the command that the driver prints."
            )

    def _watch_ranks(self) -> None:
        """Note which ranks go first: torchrun ends the others at once, and all look alike then."""
        lives = {life: str(hello) for hello, life in self._lives.values()}
        while not self._stopped.is_set():
            if gone := wait(list(lives), timeout=_LOOK):
                self._lost = [lives[life] for life in lives if life in gone]
                return

    def _await_end(self, child: processes.Child) -> None:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(_LAST_WORDS)
