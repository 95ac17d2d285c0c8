"""Keeps sandboxes within their storage where the file system has no quota per directory.

A single file is bounded by a resource limit. For the sum, the free space of the file system is polled:
it costs one call a second, and only when much has gone is anything measured, so that well-behaved
sandboxes pay nothing however many files they hold.
"""

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Protocol

INTERVAL = 1.0  # s between polls
_MIB = 1 << 20
_LEAST_MB = 64  # a loss of free space below this is not looked into


class Stored(Protocol):
    """What is watched. `over_storage` is awaited once when it holds more than `storage_mb` MiB."""

    storage_mb: int

    async def used_mb(self) -> int: ...

    async def over_storage(self) -> None: ...


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
        most = _free_bytes(self._root)  # free space when all was last known to be well
        while True:
            await asyncio.sleep(INTERVAL)
            free = _free_bytes(self._root)
            most = max(most, free)
            threshold = min(sandbox.storage_mb for sandbox in self._watched) * _MIB // 2
            if most - free >= max(threshold, _LEAST_MB * _MIB):
                await self._measure()
                most = _free_bytes(self._root)

    async def _measure(self) -> None:
        for sandbox in list(self._watched):
            used = await sandbox.used_mb()
            if used > sandbox.storage_mb and sandbox in self._watched:
                self._watched.discard(sandbox)
                await sandbox.over_storage()


def used_mb(directory: Path) -> int:
    """MiB that a tree occupies on its disk, however deep it is."""
    done = subprocess.run(["du", "-sxm", str(directory)], capture_output=True, text=True)
    return int(done.stdout.split()[0]) if done.stdout else 0  # nothing: it has just been deleted


def _free_bytes(root: Path) -> int:
    space = os.statvfs(root)
    return space.f_bavail * space.f_frsize
