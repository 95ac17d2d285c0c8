"""Memory, process and CPU limits by control groups, where this process may create them.

Version 1 (one tree per controller) and version 2 (one tree for all) are both detected by making a
group and looking for its files: what is mounted says little about what is permitted. Where neither
serves, `detect` returns nothing and the sandbox falls back to per-process limits.
"""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from titogym.envs.sandboxes import owners
from titogym.envs.task import Limits

PARENT = "titogym"  # all our groups live below a group of this name
CONTROLLERS = ("memory", "pids", "cpu")
_CPU_PERIOD_US = 100_000
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A directory in which groups may be made, and the controllers that they then have."""

    version: int
    parent: Path
    controllers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The control groups of one sandbox: one directory per hierarchy."""

    directories: dict[str, Path]  # controller -> directory
    version: int

    @property
    def limits_memory(self) -> bool:
        return "memory" in self.directories

    def add(self, pid: int) -> None:
        """Move a process; its later children follow."""
        for directory in set(self.directories.values()):
            (directory / "cgroup.procs").write_text(str(pid))

    def oom_kills(self) -> int:
        """How many processes the kernel has killed here for want of memory."""
        if not self.limits_memory:
            return 0
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        with suppress(OSError), open(self.directories["memory"] / name, "rb", 0) as file:
            for line in file.read().splitlines():
                key, _, value = line.partition(b" ")
                if key == b"oom_kill":
                    return int(value)
        return 0


def detect() -> tuple[Hierarchy, ...]:
    """The hierarchies that really work here; empty when none does."""
    found: list[Hierarchy] = []
    for version, controllers, candidates in _mounted():
        missing = tuple(name for name in controllers if not any(name in known.controllers for known in found))
        for base in candidates:
            if missing and (usable := _probe(version, base / PARENT, missing)):
                found.append(Hierarchy(version, base / PARENT, usable))
                break
    return tuple(found)


def create(hierarchies: tuple[Hierarchy, ...], name: str, limits: Limits) -> Cgroup | None:
    """Make the groups of one sandbox and set its limits. None when there is no hierarchy."""
    made: dict[str, Path] = {}
    for hierarchy, directory in zip(hierarchies, directories(hierarchies, name), strict=True):
        directory.mkdir(exist_ok=True)
        made |= dict.fromkeys(hierarchy.controllers, directory)
        _limit(hierarchy, directory, limits)
    return Cgroup(made, hierarchies[0].version) if made else None


def leftovers(hierarchies: tuple[Hierarchy, ...]) -> set[str]:
    """Names of the sandbox groups that exist."""
    names: set[str] = set()
    for hierarchy in hierarchies:
        with suppress(OSError):
            names |= {entry.name for entry in os.scandir(hierarchy.parent) if entry.is_dir()}
    return names


def directories(hierarchies: tuple[Hierarchy, ...], name: str) -> list[Path]:
    """Where the groups of the sandbox `name` are, or will be."""
    return [hierarchy.parent / name for hierarchy in hierarchies]


def destroy(groups: Iterable[Path], timeout: float = 5.0) -> bool:
    """Kill what is left in these groups and remove them. False when one would not go within `timeout` (s)."""
    deadline = time.monotonic() + timeout
    remaining = set(groups)
    while True:
        for directory in list(remaining):
            try:
                directory.rmdir()
                remaining.discard(directory)
            except FileNotFoundError:
                remaining.discard(directory)
            except OSError:  # busy: something still runs in it
                _kill_members(directory)
        if not remaining or time.monotonic() > deadline:
            return not remaining
        time.sleep(0.005)


def _kill_members(directory: Path) -> None:
    with suppress(OSError, ValueError):
        for pid in (directory / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _mounted() -> Iterator[tuple[int, tuple[str, ...], list[Path]]]:
    """Each mounted hierarchy that carries a controller of ours: version, controllers, candidate bases."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, mount = before.split()[3:5]
        if kind == "cgroup":
            names = tuple(name for name in CONTROLLERS if name in options.split(","))
            path = next((path for key, path in own.items() if set(names) & set(key.split(","))), "/")
            if names:  # below our own group, so that limits set on us still hold
                inside = Path(mount) / os.path.relpath(path, root)
                yield 1, names, [inside if inside.is_dir() else Path(mount)]
        elif kind == "cgroup2":
            inside = Path(mount) / os.path.relpath(own.get("", "/"), root)
            # A group with processes cannot hand controllers down: look upwards from our own group.
            yield 2, CONTROLLERS, [base for base in inside.parents if base.is_relative_to(mount)]


def _probe(version: int, parent: Path, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Which of the `wanted` controllers a group below `parent` really gets."""
    trial = parent / owners.new_id()  # which is reaped like a sandbox if we are killed here
    try:
        parent.mkdir(exist_ok=True)
        if version == 2:
            available = (parent / "cgroup.controllers").read_text().split()
            enable = " ".join(f"+{name}" for name in wanted if name in available)
            (parent / "cgroup.subtree_control").write_text(enable)
        trial.mkdir(exist_ok=True)
        try:
            return tuple(
                name
                for name in wanted
                if os.access(trial / _limit_files(version, name, Limits())[0][0], os.W_OK)
            )
        finally:
            trial.rmdir()
    except OSError:
        return ()


def _limit(hierarchy: Hierarchy, directory: Path, limits: Limits) -> None:
    for controller in hierarchy.controllers:
        for name, value in _limit_files(hierarchy.version, controller, limits):
            with suppress(FileNotFoundError):  # swap files are absent where swap is not accounted
                (directory / name).write_text(value)


def _limit_files(version: int, controller: str, limits: Limits) -> list[tuple[str, str]]:
    """Files to write, in order; the first one exists wherever the controller does."""
    memory, quota = limits.memory_mb * _MIB, round(limits.cpus * _CPU_PERIOD_US)
    return {
        (1, "memory"): [
            ("memory.limit_in_bytes", str(memory)),
            ("memory.memsw.limit_in_bytes", str(memory)),
        ],
        (2, "memory"): [("memory.max", str(memory)), ("memory.swap.max", "0")],
        (1, "pids"): [("pids.max", str(limits.processes))],
        (2, "pids"): [("pids.max", str(limits.processes))],
        (1, "cpu"): [("cpu.cfs_quota_us", str(quota)), ("cpu.cfs_period_us", str(_CPU_PERIOD_US))],
        (2, "cpu"): [("cpu.max", f"{quota} {_CPU_PERIOD_US}")],
    }[version, controller]
