"""Directories for the time of one process, which the next one sweeps up if this one is killed."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titogym.envs.sandboxes import owners


@contextmanager
def scratch_directory(prefix: str) -> Iterator[Path]:
    """A fresh directory `PREFIX-OWNER` among the temporary files; those of dead owners are deleted first."""
    sweep(prefix)
    directory = Path(tempfile.gettempdir(), f"{prefix}-{owners.new_id()}")
    directory.mkdir(mode=0o700)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def sweep(prefix: str) -> list[Path]:
    """Delete the scratch directories of dead processes; returns those that are gone."""
    swept = []
    for directory in Path(tempfile.gettempdir()).glob(f"{prefix}-*"):
        owner = owners.owner_of(directory.name.removeprefix(f"{prefix}-"))
        if owner is not None and owner.dead():
            with suppress(OSError):
                shutil.rmtree(directory)
                swept.append(directory)
    return swept
