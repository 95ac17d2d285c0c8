"""RMSNorm for layer specs, also where its input is cut along the sequence over tensor-parallel ranks."""

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class RMSNorm(nn.RMSNorm):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # The mark by which megatron adds up, over tensor-parallel ranks, gradients of weights that are
        # copies of one another but saw different tokens.
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel
