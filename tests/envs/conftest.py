"""A place for sandboxes that their users can enter (pytest's own directories are closed to them)."""

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from titogym.envs.sandboxes.local import LocalBackend


@pytest.fixture(scope="session")
def sandboxes() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="titogym-test-", dir="/var/tmp"))
    os.chmod(root, 0o711)
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
async def backend(sandboxes: Path) -> AsyncIterator[LocalBackend]:
    """A backend; fails the test that leaves a sandbox behind."""
    yield LocalBackend(sandboxes, {"run": "tests"})
    assert not os.listdir(sandboxes), "the test left a sandbox behind"
