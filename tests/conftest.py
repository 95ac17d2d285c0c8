"""Fixtures shared by every area."""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

from tests.engines.fixtures import sglang_server, tiny_model

__all__ = ["sglang_server", "tiny_model"]

settings.register_profile("titogym", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("titogym")

# A test run in the background may have been told to ignore SIGINT; the programs that it interrupts must not.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Two cores are shared by engine, trainer and tests: more threads only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _place(item: pytest.Item) -> int:
    return -1 if item.get_closest_marker("engine") else "tests/templates" in item.path.as_posix()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tell the parallel workers what belongs together; skip GPU tests where there is no GPU, and say so.

    What meets real engines takes longest and goes first. The templates' tests, whose tokenizers take
    gigabytes, go last: every process that a large process starts is a copy of its page tables.
    """
    items.sort(key=_place)
    for item in items:
        # One worker for all that meets a real engine, which takes a minute to start and 3 GB; otherwise a
        # file stays whole, so that its fixtures are made once.
        group = "engine" if item.get_closest_marker("engine") else item.path.as_posix()
        item.add_marker(pytest.mark.xdist_group(group))
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
