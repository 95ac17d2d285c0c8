"""The ranks of one trainer. Rank 0 hears the driver, passes every call on, and answers when all agree.

The ranks talk to one another over torch.distributed in the middle of a call; here go only the calls and how
they ended. Whatever happens to a rank, the driver gets an answer that names it: a dead one is noticed at
once by the end of its pipe, one that hangs by the time limit of the collective that waits for it.
"""

import os
import queue
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from titogym import processes
from titogym.errors import UserError
from titogym.trainer.backends.base import BackendSpec

_START = 300.0  # seconds for all ranks to load what they need
_GRACE = 10.0  # seconds for the other ranks to fail too, once one has

# How a call ended: its value, or the message of what it raised.
Kind = Literal["result", "user_error", "error"]
Outcome = tuple[Kind, Any]


class RanksLost(Exception):
    """The ranks no longer work together; the message names those at fault. The trainer has to end."""


def attempt(call: Callable[[], Any]) -> Outcome:
    """How `call` ends. What is no mistake of the user's is written to the log in full."""
    try:
        return "result", call()
    except UserError as error:
        return "user_error", str(error)
    except Exception as error:
        traceback.print_exc()
        return "error", f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class Member:
    """Another rank, as rank 0 holds it."""

    connection: Connection
    ending: Callable[[], str]  # how it ended, asked when its connection has been closed


class Team:
    """Ranks 1, 2, ... however they were started. Each is told the spec, and where the ranks meet.

    They meet on the machine of this rank, which the others know as `host`. `give_up` is called, from another
    thread, when this rank is stuck in a call because of another one.
    """

    def __init__(
        self, spec: BackendSpec, members: Mapping[int, Member], host: str, give_up: Callable[[str], None]
    ) -> None:
        self._patience = spec.timeout
        self._started = False
        self._give_up = give_up
        self._outcomes: queue.SimpleQueue[tuple[int, Outcome | None]] = queue.SimpleQueue()
        self._waiting = threading.Event()  # this rank has done its part of the call
        self._members = members
        place = {
            "WORLD_SIZE": str(spec.layout.world),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(processes.free_port("")),
            # torchrun's store knows the addresses of ranks that have died; ours starts with this team.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        for rank, member in members.items():
            with suppress(OSError):  # a dead rank is reported by `agree`
                member.connection.send((spec, place))
            threading.Thread(target=self._listen, args=(rank, member), daemon=True).start()
        os.environ |= place | {"RANK": "0", "LOCAL_RANK": "0"}

    def call(self, message: tuple[str, Sequence[Any]]) -> None:
        """Pass a call on, before this rank does its own part of it."""
        self._waiting.clear()
        for member in self._members.values():
            with suppress(OSError):  # a dead rank is reported by `agree`
                member.connection.send(message)

    def agree(self, own: Outcome) -> Outcome:
        """Wait until every rank has ended the call as this one did. Raises `RanksLost` when one did not."""
        self._waiting.set()
        outcomes: dict[int, Outcome] = {0: own}
        patience = self._patience if own[0] == "result" else _GRACE
        if not self._started:
            patience = max(patience, _START)
        while missing := self._members.keys() - outcomes.keys():
            try:
                rank, outcome = self._outcomes.get(timeout=patience)
            except queue.Empty:
                names = ", ".join(map(str, sorted(missing)))
                raise RanksLost(f"rank {names} did not answer in time{_said(outcomes)}") from None
            if outcome is None:
                raise RanksLost(self._members[rank].ending())
            outcomes[rank] = outcome
        self._started = True
        ends = {(kind, None if kind == "result" else value) for kind, value in outcomes.values()}
        if len(ends) > 1:
            raise RanksLost(f"the ranks did not agree{_said(outcomes)}")
        return own

    def _listen(self, rank: int, member: Member) -> None:
        outcome: Outcome | None = None
        while True:
            try:
                outcome = member.connection.recv()
            except (EOFError, OSError):
                outcome = None
            self._outcomes.put((rank, outcome))
            failed = outcome is None or outcome[0] != "result"
            if failed and not self._waiting.wait(_GRACE):
                said = member.ending() if outcome is None else f"rank {rank} failed: {outcome[1]}"
                self._give_up(said)
            if outcome is None:
                return


def _said(outcomes: dict[int, Outcome]) -> str:
    return "".join(
        f"; rank {rank}: {'done' if kind == 'result' else value}"
        for rank, (kind, value) in sorted(outcomes.items())
    )
