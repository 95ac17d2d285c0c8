"""Watching whole process trees from tests."""

import time
from collections.abc import Callable, Iterable

import psutil


def family(pid: int) -> list[psutil.Process]:
    """Process `pid` and everything it started."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run. A zombie is dead: it only waits for its parent to look."""
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found


def eventually(condition: Callable[[], bool], timeout: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
