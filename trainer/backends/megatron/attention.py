"""Causal attention over packed sequences with torch's fused kernel.

Megatron's own unfused attention builds the whole score matrix and takes no packed sequences, and the
fused one needs Transformer Engine. This one fits its interface and runs on any device.
"""

from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class PackedCausalAttention(nn.Module):
    """Core attention for layer specs. Every sequence of the pack attends to itself alone.

    `query` is `[tokens, heads, dim]`, `key` and `value` `[tokens, groups, dim]` ("thd" layout); the
    result is `[tokens, heads * dim]`. Sequences are attended one by one, which on a CPU is as fast as
    padding them to one length when they are equal, and faster when they are not.
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
        attended = [
            scaled_dot_product_attention(
                query[start:end].transpose(0, 1)[None],
                key[start:end].transpose(0, 1)[None],
                value[start:end].transpose(0, 1)[None],
                is_causal=True,
                scale=self.softmax_scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
            for start, end in pairwise(bounds)
        ]
        return torch.cat(attended).flatten(1)
