"""Destroys what dead drivers left behind: directories, control groups, processes.

A sandbox's processes die with their driver; its directory and control groups stay. Both bear the
sandbox's id, which names the owner (see `owners`), so leftovers are told from living sandboxes by
looking at names alone, whatever the moment at which the driver was killed.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from titogym.envs.sandboxes import cgroups, owners
from titogym.envs.sandboxes.base import Reaped, SandboxError

RECORD = "record.json"


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
    # The owner may have run in another control group than this process, and so have made its own elsewhere.
    groups = {*cgroups.directories(hierarchies, name), *_recorded_groups(root / name)}
    if not cgroups.destroy(groups):
        raise SandboxError(f"The control group of sandbox {name} is still busy.")
    directory = root / name
    with suppress(RecursionError):
        shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():  # modes that shut out their owner, or a tree too deep for Python
        subprocess.run(["chmod", "-R", "u+rwx", str(directory)], capture_output=True)
        subprocess.run(["rm", "-rf", "--one-file-system", str(directory)], capture_output=True)
    if directory.exists():
        raise SandboxError(f"Could not delete {directory}.")


def write_record(directory: Path, labels: Mapping[str, str], groups: Iterable[Path]) -> None:
    """Say what a sandbox is for and where its control groups will be, before anything of it is made."""
    record = {"labels": dict(labels), "groups": [str(group) for group in groups], "created": time.time()}
    (directory / RECORD).write_text(json.dumps(record))


def _recorded_groups(directory: Path) -> list[Path]:
    try:
        return [Path(group) for group in json.loads((directory / RECORD).read_text())["groups"]]
    except (OSError, ValueError, KeyError):  # killed while it was written: nothing else was made yet
        return []


def _kill_processes(name: str) -> None:
    """Kill what still carries the sandbox's id on its command line: bubblewrap and process 1."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with suppress(OSError):
                line = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
                if any(argument == name.encode() for argument in line):
                    os.kill(int(entry), signal.SIGKILL)
