"""What is left of processes that should have ended."""

import psutil


def assert_gone(*processes: psutil.Process) -> None:
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
