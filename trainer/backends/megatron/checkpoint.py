"""Checkpoints in Megatron's distributed format, written so that a kill at any moment loses none.

A checkpoint path holds complete versions, `step-N/`, and a file `latest` that names the one to load.
A version is written under another name, flushed and renamed; then `latest` is replaced; then older
versions are deleted.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from titogym.errors import UserError
from titogym.trainer.backends.megatron import compat
from titogym.trainer.backends.megatron.model import PolicyModel

_LATEST = "latest"
_PARTIAL = "partial-"


class _InProcessStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's `torch_dist` format, written by this process.

    The stock writer starts helper processes, one of which outlives a trainer that is killed.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        torch_save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(
    path: Path, model: PolicyModel, optimizer: MegatronOptimizer, step: int, config: Mapping[str, Any]
) -> None:
    """Write weights, optimizer state and step as the latest version under `path`."""
    path.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    name = f"step-{step}"
    partial = path / f"{_PARTIAL}{name}"
    partial.mkdir()
    dist_checkpointing.save(
        _state(model, optimizer, is_loading=False), str(partial), _InProcessStrategy("torch_dist", 1)
    )
    write_json(partial / "titogym.json", {"step": step, "config": dict(config)})
    _flush(partial)
    if (path / name).exists():  # the same step again: step aside first, `latest` is checked on load
        name = f"step-{step}-{os.getpid()}"
    os.rename(partial, path / name)
    write_text(path / _LATEST, name)
    for old in path.iterdir():
        if old.is_dir() and old.name != name:
            shutil.rmtree(old)


def load(path: Path, model: PolicyModel, optimizer: MegatronOptimizer, config: Mapping[str, Any]) -> int:
    """Restore `model` and `optimizer` from the latest version under `path`. Returns its step.

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
    state = dist_checkpointing.load(_state(model, optimizer, is_loading=True), str(version))
    model.load_state_dict(state["model"])
    with compat.on_this_device():
        optimizer.load_state_dict(state["optimizer"])
    return int(saved["step"])


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
    _flush_directory(path.parent)


def _state(model: PolicyModel, optimizer: MegatronOptimizer, *, is_loading: bool) -> dict[str, Any]:
    weights = model.sharded_state_dict()
    with compat.on_this_device():
        return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading)}


def _remove_leftovers(path: Path) -> None:
    for item in path.glob(f"{_PARTIAL}*"):
        shutil.rmtree(item) if item.is_dir() else item.unlink()


def _flush(directory: Path) -> None:
    """Bring everything in `directory` to the disk."""
    for item in directory.iterdir():
        with item.open("rb") as handle:
            os.fsync(handle.fileno())
    _flush_directory(directory)


def _flush_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
