"""Checkpoints in Megatron's distributed format: written in one layout, read in any other."""

from pathlib import Path
from typing import Any

import torch
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

from titogym.trainer.backends.megatron import compat
from titogym.trainer.backends.megatron.model import PolicyModel

# Megatron's name for: optimizer state as tensors of the model's own shapes, whatever ranks hold of them.
_SHARDING = "fully_reshardable"


class _InProcessStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's `torch_dist` format, written by the ranks themselves.

    The stock writer starts helper processes, one of which outlives a trainer that is killed.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        torch_save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def write(version: Path, model: PolicyModel, optimizer: MegatronOptimizer) -> None:
    """Write weights and optimizer state to the directory `version`. Collective."""
    state = _state(model, optimizer, is_loading=False)
    dist_checkpointing.save(state, str(version), _InProcessStrategy("torch_dist", 1))


def read(version: Path, model: PolicyModel, optimizer: MegatronOptimizer, step: int) -> None:
    """Restore what `write` has written after `step` steps, in whatever layout. Collective."""
    state = dist_checkpointing.load(_state(model, optimizer, is_loading=True), str(version))
    model.load_state_dict(state["model"])
    for i, part in enumerate(_parts(optimizer)):
        settings = part.state_dict()
        for group in settings["optimizer"]["param_groups"]:
            group["step"] = step
        with compat.on_this_device():
            part.load_state_dict(
                settings | {"param_state": state["optimizer"][i], "param_state_sharding_type": _SHARDING}
            )
        for held in part.optimizer.state.values():
            if "step" in held:  # all hold the same tensor now, which each of them would count up
                held["step"] = held["step"].clone()


def _state(model: PolicyModel, optimizer: MegatronOptimizer, *, is_loading: bool) -> dict[str, Any]:
    """Tensors only, under names of the whole model.

    What else an optimizer would save (its groups and their settings) differs between layouts, and the run
    has it anyway.
    """
    weights = model.sharded_state_dict()
    moments = {}
    for i, part in enumerate(_parts(optimizer)):
        _begin(part.optimizer)
        with compat.on_this_device():
            state = part.sharded_state_dict(
                weights, is_loading=is_loading, metadata={"distrib_optim_sharding_type": _SHARDING}
            )
        moments[i] = state["param_state"]
    return {"model": weights, "optimizer": moments}


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Megatron's distributed optimizers: one for dense parameters, one for experts that are spread out."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _begin(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state that torch's AdamW makes at its first step; megatron's lacks `step`."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
