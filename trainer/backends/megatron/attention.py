"""Causal attention over packed sequences with torch's fused kernel.

Megatron's own unfused attention builds the whole score matrix and takes neither packed sequences nor
context parallelism, and the fused one needs Transformer Engine. This one fits its interface and runs on
any device.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class PackedCausalAttention(nn.Module):
    """Core attention for layer specs. Every sequence of the pack attends to itself alone.

    `query` is `[tokens, heads, dim]`, `key` and `value` `[tokens, groups, dim]` ("thd" layout); the
    result is `[tokens, heads * dim]`. Sequences are attended one by one, which on a CPU is as fast as
    padding them to one length when they are equal, and faster when they are not.

    Under context parallelism a rank holds the chunks of each sequence that `packing.Share` says. Keys and
    values of all ranks are gathered (Llama 3, Dubey et al. 2024, section 3.3.2); queries stay where they are.
    """

    def __init__(self, *, softmax_scale: float | None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        attn_mask_type: object,
        attention_bias: None,
        packed_seq_params: PackedSeqParams,
    ) -> Tensor:
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        if parallel_state.get_context_parallel_world_size() > 1:
            return self._across_ranks(query, key, value, bounds)
        attended = [
            self._attend(query[start:end], key[start:end], value[start:end])
            for start, end in pairwise(bounds)
        ]
        return torch.cat(attended).flatten(1)

    def _across_ranks(self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> Tensor:
        ranks = parallel_state.get_context_parallel_world_size()
        rank = parallel_state.get_context_parallel_rank()
        keys, values = _gathered(key), _gathered(value)
        attended = []
        for start, end in pairwise(bounds):
            here, chunk = slice(start // ranks, end // ranks), (end - start) // (2 * ranks)
            k, v = _in_order(keys[:, here], chunk), _in_order(values[:, here], chunk)
            for q, number in zip(torch.split(query[here], chunk), (rank, 2 * ranks - 1 - rank), strict=True):
                seen = (number + 1) * chunk
                attended.append(self._attend(q, k[:seen], v[:seen], number * chunk))
        return torch.cat(attended).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, skipped: int = 0) -> Tensor:
        """`query` holds the tokens after the first `skipped` of those in `key` and `value`."""
        mask = None
        if skipped:
            mask = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device).tril(skipped)
        q, k, v = (part.transpose(0, 1)[None] for part in (query, key, value))
        attended = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=True
        )
        return attended[0].transpose(0, 1)


def _in_order(held: Tensor, chunk: int) -> Tensor:
    """One sequence in order, from what each rank holds of it: `[ranks, 2 * chunk, ...]`."""
    front, back = held[:, :chunk], held[:, chunk:].flip(0)
    return torch.cat([front, back]).flatten(0, 1)


def _gathered(local: Tensor) -> Tensor:
    whole: Tensor = _Gather.apply(local)  # type: ignore[no-untyped-call]
    return whole


class _Gather(torch.autograd.Function):
    """`[tokens, ...]` of each context rank as `[ranks, tokens, ...]` on all of them."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        local = local.contiguous()
        ranks = parallel_state.get_context_parallel_world_size()
        parts = [torch.empty_like(local) for _ in range(ranks)]
        dist.all_gather(parts, local, group=parallel_state.get_context_parallel_group())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
        return gradient[parallel_state.get_context_parallel_rank()].clone()
