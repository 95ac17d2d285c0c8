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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from titogym.envs.sandboxes import cgroups, owners
from titogym.envs.sandboxes.base import Reaped, SandboxError

RECORD = "record.json"
_PASSES, _SETTLE = 10, 0.02  # s between them


def reap(root: Path, hierarchies: tuple[cgroups.Hierarchy, ...]) -> Reaped:
    """Destroy every sandbox under `root` whose owner is dead.

    Looks again as long as it finds something: what a driver was just starting when it was killed may
    show only after a moment.
    """
    destroyed: list[str] = []
    failed: dict[str, str] = {}
    for _ in range(_PASSES):
        found = leftovers(root, hierarchies) - failed.keys()
        if not found:
            break
        for name in sorted(found):
            try:
                _kill_processes(name)
                remove(root, hierarchies, name)
                destroyed.append(name)
            except SandboxError as error:
                failed[name] = str(error)
        time.sleep(_SETTLE)
    else:
        still = leftovers(root, hierarchies) - failed.keys()
        failed |= dict.fromkeys(still, "its processes could not be killed")
    return Reaped([name for name in dict.fromkeys(destroyed) if name not in failed], failed)


def leftovers(root: Path, hierarchies: tuple[cgroups.Hierarchy, ...]) -> set[str]:
    """Ids of the sandboxes, or parts of sandboxes, whose owner is dead, or out of sight and overdue."""
    names = cgroups.leftovers(hierarchies) | {name for name, _ in _processes()}
    with suppress(FileNotFoundError):
        names |= set(os.listdir(root))
    return {name for name in names if _abandoned(root, name)}


def _abandoned(root: Path, name: str) -> bool:
    owner = owners.owner_of(name)
    if owner is None:
        return False
    if owner.visible():
        return owner.dead()
    try:
        return time.time() > float(_record(root / name)["expires"])
    except (KeyError, TypeError, ValueError):
        return False


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


def write_record(directory: Path, labels: Mapping[str, str], groups: Iterable[Path], lifetime: float) -> None:
    """Say what a sandbox is for and where its control groups will be, before anything of it is made."""
    record = {
        "labels": dict(labels),
        "groups": [str(group) for group in groups],
        "expires": time.time() + lifetime,
    }
    (directory / RECORD).write_text(json.dumps(record))


def _recorded_groups(directory: Path) -> list[Path]:
    return [Path(group) for group in _record(directory).get("groups", ())]


def _record(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / RECORD).read_text())
    except (OSError, ValueError):  # killed while it was written: nothing else was made yet
        return {}
    return found if isinstance(found, dict) else {}


def _kill_processes(name: str) -> None:
    """Kill what still carries the sandbox's id on its command line: bubblewrap and process 1."""
    for found, pid in _processes():
        if found == name:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _processes() -> Iterator[tuple[str, int]]:
    """The processes of this user's sandboxes on this machine: sandbox id and pid."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with suppress(OSError):
                for argument in Path("/proc", entry, "cmdline").read_bytes().split(b"\0"):
                    if argument.count(b"-") == 3 and owners.owner_of(argument.decode(errors="replace")):
                        yield argument.decode(), int(entry)
