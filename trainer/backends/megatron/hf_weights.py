"""Weights by their Hugging Face names: reading, writing, and the mapping to Megatron's fused tensors.

The mapping only cuts and joins rows, so a round trip is exact to the bit.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from titogym.errors import UserError
from titogym.trainer.backends.megatron.model import PolicyModel

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Slot:
    """One Megatron parameter, the Hugging Face tensors that it holds, and how to go to and fro."""

    parameter: str
    names: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor] = lambda parts: parts[0]
    cut: Callable[[Tensor], Sequence[Tensor]] = lambda whole: (whole,)


def slots(config: TransformerConfig, tied: bool) -> Iterator[Slot]:
    """Every parameter of the model, in the order of the layers."""
    groups = config.num_query_groups
    queries = config.num_attention_heads // groups

    def join_qkv(parts: Sequence[Tensor]) -> Tensor:
        """Rows of each query group together: its queries, its key, its value."""
        per_group = [part.view(groups, -1, part.shape[-1]) for part in parts]
        return torch.cat(per_group, dim=1).flatten(0, 1)

    def cut_qkv(whole: Tensor) -> Sequence[Tensor]:
        per_group = whole.view(groups, queries + 2, -1, whole.shape[-1])
        heads = torch.tensor_split(per_group, (queries, queries + 1), dim=1)
        return [part.flatten(0, 2) for part in heads]

    def join_halves(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    def cut_halves(whole: Tensor) -> Sequence[Tensor]:
        return whole.chunk(2)

    yield Slot("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
    for i in range(config.num_layers):
        here, there = f"decoder.layers.{i}.", f"model.layers.{i}."
        qkv = tuple(f"{there}self_attn.{kind}_proj.weight" for kind in "qkv")
        yield Slot(f"{here}input_layernorm.weight", (f"{there}input_layernorm.weight",))
        yield Slot(f"{here}self_attention.linear_qkv.weight", qkv, join_qkv, cut_qkv)
        if config.qk_layernorm:
            for kind in "qk":
                norm = f"{there}self_attn.{kind}_norm.weight"
                yield Slot(f"{here}self_attention.{kind}_layernorm.weight", (norm,))
        yield Slot(f"{here}self_attention.linear_proj.weight", (f"{there}self_attn.o_proj.weight",))
        yield Slot(f"{here}pre_mlp_layernorm.weight", (f"{there}post_attention_layernorm.weight",))
        gate_up = (f"{there}mlp.gate_proj.weight", f"{there}mlp.up_proj.weight")
        yield Slot(f"{here}mlp.linear_fc1.weight", gate_up, join_halves, cut_halves)
        yield Slot(f"{here}mlp.linear_fc2.weight", (f"{there}mlp.down_proj.weight",))
    yield Slot("decoder.final_layernorm.weight", ("model.norm.weight",))
    if not tied:
        yield Slot("output_layer.weight", ("lm_head.weight",))


def export_weights(model: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by its Hugging Face name, contiguous, detached, in the model's dtype."""
    parameters = dict(model.named_parameters())
    for slot in slots(model.config, model.share_embeddings_and_output_weights):
        whole = parameters[slot.parameter].detach()
        for name, tensor in zip(slot.names, slot.cut(whole), strict=True):
            yield name, tensor.contiguous()


@torch.no_grad()
def import_weights(model: PolicyModel, model_dir: Path) -> None:
    """Copy the safetensors of `model_dir` into `model`.

    Raises `UserError` when a tensor is missing, left over or of another shape than the config says.
    """
    files = _tensor_files(model_dir)
    left = set(files)
    parameters = dict(model.named_parameters())
    for slot in slots(model.config, model.share_embeddings_and_output_weights):
        missing = [name for name in slot.names if name not in files]
        if missing:
            raise UserError(f"{model_dir} has no tensor {missing[0]}: its weights and config.json disagree")
        parameter = parameters[slot.parameter]
        shapes = [part.shape for part in slot.cut(parameter)]
        parts = [_read(files[name], name) for name in slot.names]
        for name, part, shape in zip(slot.names, parts, shapes, strict=True):
            if part.shape != shape:
                raise UserError(
                    f"{name} in {model_dir} has shape {list(part.shape)}, but its config.json asks for "
                    f"{list(shape)}"
                )
        parameter.copy_(slot.join(parts))
        left.difference_update(slot.names)
    left = {name for name in left if not name.endswith("rotary_emb.inv_freq")}  # computed, not learned
    if model.share_embeddings_and_output_weights:
        left.discard("lm_head.weight")
    if left:
        raise UserError(f"{model_dir} has tensors that the model has no place for, such as {min(left)}")


@torch.no_grad()
def initialize(model: PolicyModel, seed: int, std: float) -> None:
    """Random weights: norms 1, matrices normal(0, std), and std / sqrt(2 * layers) where a layer adds its
    output to the residual stream (Radford et al. 2019, section 2.3). The same for every way of sharding.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters())
    residual = std / math.sqrt(2 * model.config.num_layers)
    for slot in slots(model.config, model.share_embeddings_and_output_weights):
        parameter = parameters[slot.parameter]
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        scale = residual if slot.names[0].endswith(("o_proj.weight", "down_proj.weight")) else std
        shapes = [part.shape for part in slot.cut(parameter)]
        parameter.copy_(slot.join([torch.randn(shape, generator=generator) * scale for shape in shapes]))


def write_weights(model: PolicyModel, model_dir: Path) -> None:
    """Write `model.safetensors`, replacing an older one in one move."""
    tensors = {name: tensor.cpu() for name, tensor in export_weights(model)}
    partial = model_dir / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, model_dir / "model.safetensors")
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


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as handle:
        tensor: Tensor = handle.get_tensor(name)
    return tensor
