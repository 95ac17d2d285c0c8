"""Keeps sandboxes within their storage where the file system has no quota per directory.

A single file is bounded by a resource limit. For the sum, and for the number of files, what is free on the
file system is polled: it costs one call a second, and only when much has gone is anything measured, so
that well-behaved sandboxes pay nothing however many files they hold.
"""

import asyncio
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

INTERVAL = 1.0  # s between polls
_MIB = 1 << 20
_LEAST_MB = 64  # a loss of free space below this is not looked into
_LEAST_FILES = 4096  # the same for files
_FILES_PER_MB = 64  # as many as mke2fs gives a file system of this size
_FEWEST_FILES = 65_536  # that every sandbox may have


@dataclass(frozen=True, slots=True)
class Used:
    """What a sandbox occupies: MiB, and files of any kind."""

    mb: int
    files: int


class Stored(Protocol):
    """What is watched. `over_storage` is awaited once when it holds more than it may, with what it did."""

    storage_mb: int

    async def used(self) -> Used: ...

    async def over_storage(self, deed: str) -> None: ...


def most_files(storage_mb: int) -> int:
    """How many files a sandbox of so many MiB may have."""
    return max(_FEWEST_FILES, storage_mb * _FILES_PER_MB)


class StorageWatch:
    """Watches every sandbox of one backend while there are any."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._watched: set[Stored] = set()
        self._task: asyncio.Task[None] | None = None

    def add(self, sandbox: Stored) -> None:
        self._watched.add(sandbox)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())

    def discard(self, sandbox: Stored) -> None:
        self._watched.discard(sandbox)
        if not self._watched and self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        most = _free(self._root)  # when all was last known to be well
        while True:
            await asyncio.sleep(INTERVAL)
            free = _free(self._root)
            most = Used(max(most.mb, free.mb), max(most.files, free.files))
            smallest = min(sandbox.storage_mb for sandbox in self._watched)
            if most.mb - free.mb >= max(smallest // 2, _LEAST_MB) or most.files - free.files >= max(
                most_files(smallest) // 2, _LEAST_FILES
            ):
                await self._measure()
                most = _free(self._root)

    async def _measure(self) -> None:
        for sandbox in list(self._watched):
            used, files = await sandbox.used(), most_files(sandbox.storage_mb)
            deed = ""
            if used.mb > sandbox.storage_mb:
                deed = f"it used more than its {sandbox.storage_mb} MiB of storage"
            elif used.files > files:
                deed = f"it made more than its {files} files"
            if deed and sandbox in self._watched:
                self._watched.discard(sandbox)
                await sandbox.over_storage(deed)


def used_by(directory: Path) -> Used:
    """What a tree occupies on its disk, however deep it is. Nothing when it has just been deleted."""
    return Used(_du(directory, "-m"), _du(directory, "--inodes"))


def _du(directory: Path, unit: str) -> int:
    done = subprocess.run(["du", "-sx", unit, str(directory)], capture_output=True, text=True)
    return int(done.stdout.split()[0]) if done.stdout else 0


def _free(root: Path) -> Used:
    space = os.statvfs(root)
    return Used(space.f_bavail * space.f_frsize // _MIB, space.f_favail)
