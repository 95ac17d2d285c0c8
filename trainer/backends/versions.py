"""Checkpoint directories that a kill at any moment leaves whole.

A checkpoint path holds complete versions, `step-N/`, and a file `latest` that names the one to load.
A version is written under another name, flushed and renamed; then `latest` is replaced; then older
versions are deleted. Every rank writes its own files into the version; rank 0 does all the rest.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titogym.errors import UserError

_LATEST = "latest"
_PARTIAL = "partial-"


def save(path: Path, step: int, config: Mapping[str, Any], write: Callable[[Path], None]) -> None:
    """Make what `write` puts into the directory it is given the latest version under `path`. Collective."""
    first = dist.get_rank() == 0
    name = f"step-{step}"
    partial = path / f"{_PARTIAL}{name}"
    if first:
        path.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        partial.mkdir()
    dist.barrier()
    write(partial)
    dist.barrier()
    if first:
        write_json(partial / "titogym.json", {"step": step, "config": dict(config)})
        _flush(partial)
        if (path / name).exists():  # the same step again: step aside first, `latest` is checked on load
            name = f"step-{step}-{os.getpid()}"
        os.rename(partial, path / name)
        write_text(path / _LATEST, name)
        for old in path.iterdir():
            if old.is_dir() and old.name != name:
                shutil.rmtree(old)
    dist.barrier()


def latest(path: Path, config: Mapping[str, Any]) -> tuple[Path, int]:
    """Directory and step of the latest version under `path`.

    Raises `UserError` when there is none, or when it is of another model than `config`.
    """
    pointer = path / _LATEST
    if not pointer.exists():
        raise UserError(f"{path} holds no complete checkpoint")
    version = path / pointer.read_text()
    saved = json.loads((version / "titogym.json").read_text())
    for key in sorted(saved["config"].keys() | config.keys()):
        if saved["config"].get(key) != config.get(key):
            raise UserError(
                f"The checkpoint {path} is of another model: its {key} is {saved['config'].get(key)!r}, "
                f"that of the model to train is {config.get(key)!r}"
            )
    return version, int(saved["step"])


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace the file in one move: a reader, or a kill, sees the old text or the new."""
    partial = path.with_name(f"{_PARTIAL}{path.name}")
    with partial.open("w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(partial, path)
    flush_directory(path.parent)


def _remove_leftovers(path: Path) -> None:
    for item in path.glob(f"{_PARTIAL}*"):
        shutil.rmtree(item) if item.is_dir() else item.unlink()


def _flush(directory: Path) -> None:
    """Bring everything in `directory` to the disk."""
    for item in directory.iterdir():
        with item.open("rb") as handle:
            os.fsync(handle.fileno())
    flush_directory(directory)


def flush_directory(directory: Path) -> None:
    """Bring the names in `directory` to the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
