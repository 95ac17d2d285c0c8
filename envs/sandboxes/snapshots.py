"""Kept file systems of local sandboxes: directories beside those of the sandboxes, under ids like theirs.

They die with their driver, like everything else of it: what a dead driver kept is a leftover.
"""

import os
import subprocess
from pathlib import Path

from titogym.envs.sandboxes import bubblewrap, owners
from titogym.envs.sandboxes.base import SandboxError, Snapshot


def copy_entries(source: Path, target: Path, user: int | None) -> None:
    """Copy what is not the system's from one root directory to another, to belong to `user` there.

    Files are cloned where the file system can. Raises `SandboxError`.
    """
    entries = [str(source / name) for name in os.listdir(source) if name not in bubblewrap.SYSTEM_ENTRIES]
    _run(["cp", "-a", "--reflink=auto", "--", *entries, str(target)] if entries else ["true"])
    if user is not None:
        _run(["chown", "-hR", "--preserve-root", f"{user}:{user}", "--", str(target)])


def directory(root: Path, snapshot: Snapshot) -> Path:
    """Where the files of `snapshot` are. Raises `SandboxError` when it is not here any more."""
    path = root / snapshot.reference / "root"
    if owners.owner_of(snapshot.reference) is None or not path.is_dir():
        raise SandboxError(f"There is no {snapshot} below {root}.")
    return path


def _run(line: list[str]) -> None:
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode != 0:
        raise SandboxError(f"The files of a sandbox could not be copied: {done.stderr.strip()[-300:]}")
