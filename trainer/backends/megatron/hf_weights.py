"""Weights by their Hugging Face names: reading, drawing, handing out and writing them, in every layout."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from titogym.errors import UserError
from titogym.trainer.backends.megatron.hf_names import Slot, slots
from titogym.trainer.backends.megatron.model import PolicyModel
from titogym.trainer.backends.megatron.support import expert_count

_INDEX = "model.safetensors.index.json"


class Placement:
    """Where the parameters of a model that is spread over ranks lie, seen from this rank."""

    def __init__(self, model: PolicyModel, config: Mapping[str, Any]) -> None:
        self._parameters: dict[str, Tensor] = dict(model.named_parameters())
        self._tied = model.share_embeddings_and_output_weights
        self._offset: int = get_transformer_layer_offset(model.config)
        self._stages: int = parallel_state.get_pipeline_model_parallel_world_size()
        self._layers_per_stage: int = config["num_hidden_layers"] // self._stages
        self._experts_per_rank: int = (
            expert_count(config) // parallel_state.get_expert_model_parallel_world_size()
        )

    def stage(self, slot: Slot) -> int:
        if isinstance(slot.layer, int):
            return slot.layer // self._layers_per_stage
        return 0 if slot.layer == "first" else self._stages - 1

    def expert_rank(self, slot: Slot) -> int | None:
        return None if slot.expert is None else slot.expert // self._experts_per_rank

    def shard_group(self, slot: Slot) -> dist.ProcessGroup:
        """The ranks that share the parameter."""
        group: dist.ProcessGroup = (
            parallel_state.get_tensor_model_parallel_group()
            if slot.expert is None
            else parallel_state.get_expert_tensor_parallel_group()
        )
        return group

    def in_my_stage(self, slot: Slot) -> bool:
        return bool(self.stage(slot) == parallel_state.get_pipeline_model_parallel_rank())

    def mine(self, slot: Slot) -> Tensor | None:
        """The parameter in which this rank holds a shard of `slot`, if it holds one."""
        owner = self.expert_rank(slot)
        if owner is not None and owner != parallel_state.get_expert_model_parallel_rank():
            return None
        if self.in_my_stage(slot):
            return self._parameters[self._local_name(slot)]
        if slot.layer == "first" and self._tied:
            return self._parameters.get("output_layer.weight")  # the last stage keeps a copy
        return None

    def _local_name(self, slot: Slot) -> str:
        name = slot.parameter
        if slot.expert is not None:
            name = name.format(expert=slot.expert % self._experts_per_rank)
        if isinstance(slot.layer, int):
            name = f"decoder.layers.{slot.layer - self._offset}.{name}"
        return name


def _targets(model: PolicyModel, config: Mapping[str, Any]) -> Iterator[tuple[Slot, Tensor | None, int, int]]:
    """Each slot, this rank's parameter of it, and this rank's place among those that share it."""
    placement = Placement(model, config)
    for slot in slots(config):
        group = placement.shard_group(slot)
        yield slot, placement.mine(slot), dist.get_rank(group), dist.get_world_size(group)


def export_weights(model: PolicyModel, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by its Hugging Face name, whole, contiguous, detached, in the model's dtype.

    A collective operation: every rank must go through all of it, and every rank gets every tensor.
    """
    placement = Placement(model, config)
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    experts = parallel_state.get_expert_model_parallel_group()
    dtype, device = model.config.params_dtype, next(model.parameters()).device
    for slot in slots(config):
        parts: Sequence[Tensor] = []
        owner = placement.expert_rank(slot)
        if placement.in_my_stage(slot):
            if (parameter := placement.mine(slot)) is not None:
                parts = slot.cut.merge(_gather(parameter.detach(), placement.shard_group(slot)))
            if owner is not None:
                parts = _spread(parts, slot.shapes, dtype, device, owner, experts)
        parts = _spread(parts, slot.shapes, dtype, device, placement.stage(slot), pipeline)
        yield from zip(slot.names, (part.contiguous() for part in parts), strict=True)


def _gather(shard: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(ranks)]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards


def _spread(
    parts: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    owner: int,
    group: dist.ProcessGroup,
) -> Sequence[Tensor]:
    """`parts` of rank `owner` of `group`, on all its ranks."""
    if dist.get_world_size(group) == 1:
        return parts
    sent = [part.contiguous() for part in parts] or [
        torch.empty(shape, dtype=dtype, device=device) for shape in shapes
    ]
    for part in sent:
        dist.broadcast(part, src=dist.get_global_rank(group, owner), group=group)
    return sent


@torch.no_grad()
def import_weights(model: PolicyModel, model_dir: Path, config: Mapping[str, Any]) -> None:
    """Copy this rank's part of the safetensors of `model_dir` into `model`.

    Raises `UserError` when a tensor is missing, left over or of another shape than the config says.
    """
    files = _tensor_files(model_dir)
    left = set(files)
    for slot, parameter, rank, ranks in _targets(model, config):
        missing = [name for name in slot.names if name not in files]
        if missing:
            raise UserError(f"{model_dir} has no tensor {missing[0]}: its weights and config.json disagree")
        left.difference_update(slot.names)
        for name, shape in zip(slot.names, slot.shapes, strict=True):
            if (found := _shape(files[name], name)) != shape:
                raise UserError(
                    f"{name} in {model_dir} has shape {list(found)}, but its config.json asks for "
                    f"{list(shape)}"
                )
        if parameter is not None:
            parts = [_read(files[name], name) for name in slot.names]
            parameter.copy_(slot.cut.shard(parts, rank, ranks))
    left = {name for name in left if not name.endswith("rotary_emb.inv_freq")}  # computed, not learned
    if model.share_embeddings_and_output_weights:
        left.discard("lm_head.weight")
    if left:
        raise UserError(f"{model_dir} has tensors that the model has no place for, such as {min(left)}")


@torch.no_grad()
def initialize(model: PolicyModel, config: Mapping[str, Any], seed: int) -> None:
    """Random weights: norms 1, matrices normal(0, std), and std / sqrt(2 * layers) where a layer adds its
    output to the residual stream (Radford et al. 2019, section 2.3). The same in every layout.
    """
    generator = torch.Generator().manual_seed(seed)
    std = config.get("initializer_range", 0.02)
    residual = std / math.sqrt(2 * config["num_hidden_layers"])
    for slot, parameter, rank, ranks in _targets(model, config):
        if len(slot.shapes[0]) == 1:
            parts = [torch.ones(shape) for shape in slot.shapes]
        else:
            scale = residual if slot.names[0].endswith(("o_proj.weight", "down_proj.weight")) else std
            parts = [torch.randn(shape, generator=generator) * scale for shape in slot.shapes]
        if parameter is not None:
            parameter.copy_(slot.cut.shard(parts, rank, ranks))


def write_weights(model: PolicyModel, config: Mapping[str, Any], model_dir: Path) -> None:
    """Write `model.safetensors` from rank 0, replacing an older one in one move. Collective."""
    first = dist.get_rank() == 0
    tensors = {name: tensor.cpu() for name, tensor in export_weights(model, config) if first}
    if not first:
        return
    partial_file = model_dir / "model.safetensors.partial"
    save_file(tensors, partial_file, metadata={"format": "pt"})
    os.replace(partial_file, model_dir / "model.safetensors")
    (model_dir / _INDEX).unlink(missing_ok=True)


def _tensor_files(model_dir: Path) -> dict[str, Path]:
    """Tensor name -> file that holds it."""
    index = model_dir / _INDEX
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: model_dir / file for name, file in weight_map.items()}
    path = model_dir / "model.safetensors"
    if not path.exists():
        raise UserError(f"{model_dir} has no model.safetensors: save the model in the safetensors format")
    with safe_open(path, framework="pt") as handle:
        return dict.fromkeys(handle.keys(), path)


def _shape(path: Path, name: str) -> tuple[int, ...]:
    with safe_open(path, framework="pt") as handle:
        return tuple(handle.get_slice(name).get_shape())


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as handle:
        tensor: Tensor = handle.get_tensor(name)
    return tensor
