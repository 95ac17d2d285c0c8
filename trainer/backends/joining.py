"""A rank that torchrun has started finds its driver, and rank 0 the other ranks.

Every rank holds a connection to the driver that lives as long as both: its end is the end of the driver, or
the driver's word that it has given this trainer up, and ends the rank whatever it is doing. Calls take
another way, from the driver to rank 0 and from there to the others.
"""

import os
import queue
import socket
import sys
import threading
import time
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path

from titogym.errors import UserError
from titogym.trainer.backends.meeting import NOT_LET_IN, Address, Door, Hello, connect, format_address
from titogym.trainer.backends.ranks import Member, RanksLost

FAREWELL = "farewell"  # the driver has no more use for the ranks; when it has lost one, it just hangs up
_PAUSE = 0.5  # seconds between two attempts to reach the driver
_ASSEMBLY = 60.0  # seconds for the others to reach rank 0; the driver has met them all by then


class Joined:
    """This rank, known to the driver; `calls` is where its calls come from."""

    def __init__(self, driver: Address, key: bytes) -> None:
        """Returns when the driver has met every rank. Raises one of `NOT_LET_IN` when it cannot be met."""
        env = os.environ
        rank, self._world = int(env["RANK"]), int(env["WORLD_SIZE"])
        self.leads = rank == 0
        together = env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]
        self.host = "127.0.0.1" if together else env["MASTER_ADDR"]  # where the others find rank 0
        self._door = Door(("127.0.0.1" if together else "", 0), key) if self.leads else None
        team = (self.host, self._door.address[1]) if self._door is not None else None
        hello = Hello("life", rank, self._world, socket.gethostname(), os.getpid(), team)
        try:
            life = connect(driver, key, hello)
        except BaseException:
            self._close_door()
            raise
        source: Address = _word(life)
        self._life = threading.Thread(target=_word, args=(life,), daemon=True)
        self._life.start()
        try:
            self.calls = connect(source, key, Hello("calls", rank, self._world, hello.host, hello.pid))
        except NOT_LET_IN as error:
            raise UserError(
                f"Rank {rank} cannot reach rank 0 at {format_address(source)} ({error}): "
                "--master-addr of torchrun has to be an address of node 0 that every node can reach."
            ) from None

    def others(self) -> dict[int, Member]:
        """The other ranks, once all have come to this one, which is rank 0. Raises `RanksLost` otherwise."""
        assert self._door is not None
        deadline = time.monotonic() + _ASSEMBLY
        members: dict[int, Member] = {}
        while missing := set(range(1, self._world)) - members.keys():
            try:
                hello, calls = self._door.arrivals.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                names = ", ".join(map(str, sorted(missing)))
                where = f"{self.host}:{self._door.address[1]}"
                raise RanksLost(f"rank {names} has not come to rank 0 at {where}") from None
            members[hello.rank] = Member(calls, partial(str, f"{hello} closed its connection"))
        self._close_door()
        return members

    def end(self) -> None:
        """Calls come no more: the driver says why, in a moment, and ends this process."""
        self._life.join(_ASSEMBLY)
        sys.exit(1)

    def _close_door(self) -> None:
        if self._door is not None:
            self._door.close()


def join(driver: Address, key_file: Path, patience: float) -> Joined:
    """Become a rank of the driver's trainer, trying for `patience` seconds while nobody listens there.

    Raises `UserError` when it was in vain, or the driver has another key.
    """
    deadline = time.monotonic() + patience
    refused = b""
    while True:
        key = b""
        try:
            key = key_file.read_bytes()
            return Joined(driver, key)
        except AuthenticationError:
            if key == refused:  # else a driver that starts may just have written another one
                raise UserError(
                    f"The driver at {format_address(driver)} refuses the key in {key_file}, which is of "
                    "another run: start the ranks with the command that the driver prints."
                ) from None
            refused = key
        except NOT_LET_IN as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"No driver has answered at {format_address(driver)} in {patience:g} s ({error}): start "
                    "titogym train, or correct its trainer.driver_address."
                ) from None
        time.sleep(_PAUSE)


def _word(life: Connection) -> Address:
    """The next word of the driver, which may be the last: then this process ends, in mid-call if need be.

    Its status tells torchrun whether to start it again.
    """
    try:
        word = life.recv()
    except (EOFError, OSError):
        print("The driver has ended, or has given up this trainer.", file=sys.stderr, flush=True)
        os._exit(1)
    if word == FAREWELL:
        os._exit(0)
    source: Address = word
    return source
