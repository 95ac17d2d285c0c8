"""Which Hugging Face tensors each Megatron parameter holds, and how they are cut over ranks.

The mapping only cuts and joins rows and columns, so a round trip is exact to the bit in every layout.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from titogym.trainer.backends.megatron.support import ARCHITECTURES, expert_count, moe_layers


@dataclass(frozen=True, slots=True)
class Cut:
    """How Hugging Face tensors become the shards of one Megatron parameter, and back."""

    shard: Callable[[Sequence[Tensor], int, int], Tensor]  # tensors, rank, ranks
    merge: Callable[[Sequence[Tensor]], Sequence[Tensor]]  # shards in the order of ranks


@dataclass(frozen=True, slots=True)
class Slot:
    """One Megatron parameter and the Hugging Face tensors that it holds.

    `layer` is the decoder layer (over the whole model), or where outside of them: "first" or "last" stage.
    `parameter` is the name in the model, for layers the part after `decoder.layers.N.`.
    """

    parameter: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # of the tensors of these names
    cut: Cut
    layer: int | str
    expert: int | None = None


def _replicated() -> Cut:
    return Cut(lambda parts, rank, ranks: parts[0], lambda shards: [shards[0]])


def _rows() -> Cut:
    return Cut(
        lambda parts, rank, ranks: parts[0].chunk(ranks)[rank], lambda shards: [torch.cat(list(shards))]
    )


def _columns() -> Cut:
    return Cut(
        lambda parts, rank, ranks: parts[0].chunk(ranks, dim=1)[rank],
        lambda shards: [torch.cat(list(shards), dim=1)],
    )


def _halves() -> Cut:
    """Gate and up projection one after the other, each cut by rows."""
    return Cut(
        lambda parts, rank, ranks: torch.cat([part.chunk(ranks)[rank] for part in parts]),
        lambda shards: [torch.cat(half) for half in zip(*(shard.chunk(2) for shard in shards), strict=True)],
    )


def _query_groups(groups: int, queries: int) -> Cut:
    """Rows of each query group together: its queries, its key, its value; cut between groups."""

    def shard(parts: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        per_group = [part.view(groups, -1, part.shape[-1]) for part in parts]
        return torch.cat(per_group, dim=1).chunk(ranks)[rank].flatten(0, 1)

    def merge(shards: Sequence[Tensor]) -> Sequence[Tensor]:
        per_group = torch.cat(list(shards)).view(groups, queries + 2, -1, shards[0].shape[-1])
        heads = torch.tensor_split(per_group, (queries, queries + 1), dim=1)
        return [part.flatten(0, 2) for part in heads]

    return Cut(shard, merge)


def slots(config: Mapping[str, Any]) -> Iterator[Slot]:
    """Every parameter of the model that `config` (of a config.json) describes, in the order of the layers."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    groups, dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    vocabulary = (config["vocab_size"], hidden)
    norm, tied = (hidden,), config.get("tie_word_embeddings", False)

    yield Slot(
        "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (vocabulary,), _rows(), "first"
    )
    for i, moe in enumerate(moe_layers(config)):
        there = f"model.layers.{i}."
        slot = partial(Slot, layer=i)
        qkv = tuple(f"{there}self_attn.{kind}_proj.weight" for kind in "qkv")
        shapes = ((heads * dim, hidden), (groups * dim, hidden), (groups * dim, hidden))
        yield slot("input_layernorm.weight", (f"{there}input_layernorm.weight",), (norm,), _replicated())
        yield slot("self_attention.linear_qkv.weight", qkv, shapes, _query_groups(groups, heads // groups))
        if ARCHITECTURES[config["architectures"][0]]:
            for kind in "qk":
                name = f"{there}self_attn.{kind}_norm.weight"
                yield slot(f"self_attention.{kind}_layernorm.weight", (name,), ((dim,),), _replicated())
        out = f"{there}self_attn.o_proj.weight"
        yield slot("self_attention.linear_proj.weight", (out,), ((hidden, heads * dim),), _columns())
        after = f"{there}post_attention_layernorm.weight"
        yield slot("pre_mlp_layernorm.weight", (after,), (norm,), _replicated())
        if not moe:
            yield from _mlp(slot, "mlp.", f"{there}mlp.", hidden, config["intermediate_size"])
            continue
        experts = expert_count(config)
        yield slot("mlp.router.weight", (f"{there}mlp.gate.weight",), ((experts, hidden),), _replicated())
        for expert in range(experts):
            prefix = "mlp.experts.local_experts.{expert}."
            yield from _mlp(
                partial(slot, expert=expert),
                prefix,
                f"{there}mlp.experts.{expert}.",
                hidden,
                config["moe_intermediate_size"],
            )
    yield Slot("decoder.final_layernorm.weight", ("model.norm.weight",), (norm,), _replicated(), "last")
    if not tied:
        yield Slot("output_layer.weight", ("lm_head.weight",), (vocabulary,), _rows(), "last")


def _mlp(slot: Callable[..., Slot], here: str, there: str, hidden: int, intermediate: int) -> Iterator[Slot]:
    gate_up = (f"{there}gate_proj.weight", f"{there}up_proj.weight")
    yield slot(f"{here}linear_fc1.weight", gate_up, ((intermediate, hidden),) * 2, _halves())
    down = f"{there}down_proj.weight"
    yield slot(f"{here}linear_fc2.weight", (down,), ((hidden, intermediate),), _columns())
