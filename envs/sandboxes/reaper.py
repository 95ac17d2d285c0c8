"""Destroys what dead drivers left behind: directories, control groups, processes.

A sandbox's processes die with their driver; its directory and control groups stay. Both bear the
sandbox's id, which names the owner (see `owners`), so leftovers are told from living sandboxes by
looking at names alone, whatever the moment at which the driver was killed.
"""

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from titogym.envs.sandboxes import cgroups, owners
from titogym.envs.sandboxes.base import SandboxError


@dataclass(frozen=True, slots=True)
class Reaped:
    """Ids of leftovers that were destroyed, and of those that could not be, with the reason."""

    destroyed: list[str]
    failed: dict[str, str]


def reap(root: Path, hierarchies: tuple[cgroups.Hierarchy, ...]) -> Reaped:
    """Destroy every sandbox under `root` whose owner is dead."""
    destroyed: list[str] = []
    failed: dict[str, str] = {}
    for name in sorted(leftovers(root, hierarchies)):
        try:
            _kill_processes(name)
            remove(root, hierarchies, name)
            destroyed.append(name)
        except SandboxError as error:
            failed[name] = str(error)
    return Reaped(destroyed, failed)


def leftovers(root: Path, hierarchies: tuple[cgroups.Hierarchy, ...]) -> set[str]:
    """Ids of the sandboxes, or parts of sandboxes, whose owner is dead."""
    names = cgroups.leftovers(hierarchies)
    with suppress(FileNotFoundError):
        names |= set(os.listdir(root))
    return {name for name in names if (owner := owners.owner_of(name)) is not None and owner.dead()}


def remove(root: Path, hierarchies: tuple[cgroups.Hierarchy, ...], name: str) -> None:
    """Remove one sandbox's control groups and directory. Raises `SandboxError` if something remains."""
    if not cgroups.destroy(hierarchies, name):
        raise SandboxError(f"The control group of sandbox {name} is still busy.")
    directory = root / name
    with suppress(RecursionError):
        shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():  # modes that shut out their owner, or a tree too deep for Python
        subprocess.run(["chmod", "-R", "u+rwx", str(directory)], capture_output=True)
        subprocess.run(["rm", "-rf", "--one-file-system", str(directory)], capture_output=True)
    if directory.exists():
        raise SandboxError(f"Could not delete {directory}.")


def _kill_processes(name: str) -> None:
    """Kill what still carries the sandbox's id on its command line: bubblewrap and process 1."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with suppress(OSError):
                line = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
                if any(argument == name.encode() for argument in line):
                    os.kill(int(entry), signal.SIGKILL)
