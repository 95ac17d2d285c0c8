"""Who owns a sandbox: the identity of the driver process, held in the sandbox's own name.

A sandbox id is `NAMESPACE-PID-START-RANDOM`: the driver's pid namespace, its pid there, and the clock tick
at which it started (so that a reused pid is not mistaken for it). The directory and the control
groups of a sandbox bear its id, so ownership is on disk from the very call that creates them.
"""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Owner:
    namespace: int  # inode of the pid namespace
    pid: int
    started: int  # clock ticks after boot

    def dead(self) -> bool:
        """True when this process has ended. An owner in another pid namespace cannot be seen: not dead."""
        return self.namespace == _namespace() and _started(self.pid) != self.started


def me() -> Owner:
    started = _started(os.getpid())
    assert started is not None, "a running process has a start time"
    return Owner(_namespace(), os.getpid(), started)


def new_id() -> str:
    owner = me()
    return f"{owner.namespace}-{owner.pid}-{owner.started}-{secrets.token_hex(6)}"


def owner_of(sandbox_id: str) -> Owner | None:
    """The owner that an id names, None when the name is not a sandbox id."""
    parts = sandbox_id.split("-")
    if len(parts) != 4 or not all(part.isdecimal() for part in parts[:3]):
        return None
    return Owner(*(int(part) for part in parts[:3]))


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _started(pid: int) -> int | None:
    """Start time of a live process; None when there is none, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
