"""Who owns a sandbox: the identity of the driver process.

A sandbox id is `NAMESPACE-PID-START-RANDOM`: the driver's pid namespace, its pid there, and the clock tick
at which it started (so that a reused pid is not mistaken for it). The directory and the control
groups of a local sandbox bear its id, so ownership is on disk from the very call that creates them. What
lives outside this machine bears the owner as a label, which also names the machine's boot.
"""

import os
import secrets
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Owner:
    namespace: int  # inode of the pid namespace
    pid: int
    started: int  # clock ticks after boot
    boot: str  # random id of the machine's boot, so that of the machine too

    def visible(self) -> bool:
        """Whether this process could see it: it runs, or ran, on this machine in this pid namespace."""
        return self.boot == _boot() and self.namespace == _namespace()

    def dead(self) -> bool:
        """True when this process has ended. An owner out of sight is not known to be dead."""
        return self.visible() and _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"{self.boot}/{self.namespace}-{self.pid}-{self.started}"


def me() -> Owner:
    started = _started(os.getpid())
    assert started is not None, "a running process has a start time"
    return Owner(_namespace(), os.getpid(), started, _boot())


def new_id() -> str:
    owner = me()
    return f"{owner.namespace}-{owner.pid}-{owner.started}-{secrets.token_hex(6)}"


def owner_of(sandbox_id: str) -> Owner | None:
    """The owner that an id names, None when the name is not a sandbox id.

    The id of a local sandbox is taken for one of this boot: pid namespaces have new numbers after it,
    or the clock tick of the start is another.
    """
    parts = sandbox_id.split("-")
    if len(parts) != 4:
        return None
    return _owner(parts[:3], _boot())


def parse(text: str) -> Owner | None:
    """The owner that `str(owner)` wrote, None for any other text."""
    boot, slash, numbers = text.partition("/")
    return _owner(numbers.split("-"), boot) if slash else None


def _owner(numbers: list[str], boot: str) -> Owner | None:
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        return None
    namespace, pid, started = map(int, numbers)
    return Owner(namespace, pid, started, boot)


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _started(pid: int) -> int | None:
    """Start time of a live process; None when there is none, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
