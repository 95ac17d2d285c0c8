"""Small models of every kind that the backend has, and batches for them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from titogym.trainer.batch import TrainBatch

VOCABULARY = 256
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
# what `init_random` takes
TINY = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": True, **SIZES}
EXPERTS, TOP_K = 4, 2
MOE = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 48, "head_dim": 16}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# name -> (model class, config)
KINDS: dict[str, tuple[Any, Any]] = {
    "qwen3-tied": (
        Qwen3ForCausalLM,
        Qwen3Config(
            **SIZES,
            head_dim=16,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
    ),
    "qwen3-untied": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False)),
    "llama-untied": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=True, tie_word_embeddings=False),
    ),
    # its first layer has no experts, and the weights of those taken do not add up to 1
    "qwen3-moe-mixed": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=False, tie_word_embeddings=False, mlp_only_layers=[0]),
    ),
    "llama3-rope-tied": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
    ),
}


def reference(kind: str, seed: int = 1) -> Any:
    """The transformers model, with norms that are not all 1."""
    model_class, config = KINDS[kind]
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return model


def save_reference(kind: str, model_dir: Path) -> Any:
    model = reference(kind)
    model.save_pretrained(model_dir)
    return model


def batch(lengths: list[int], seed: int = 0, temperature: float = 1.0) -> TrainBatch:
    """Random sequences whose tail, about two thirds, carries loss with holes in it."""
    rng = np.random.default_rng(seed)
    made = TrainBatch([], [], [], [], temperature=temperature)
    for n in lengths:
        mask = (rng.random(n) < 0.8).astype(np.float32)
        mask[: max(1, n // 3)] = 0
        if n > 1:
            mask[n // 2 or 1] = 1
        made.tokens.append(rng.integers(0, VOCABULARY, n).astype(np.int32))
        made.loss_mask.append(mask)
        made.rollout_logprobs.append(np.full(n, -5.5, dtype=np.float32))
        made.advantages.append(np.full(n, rng.normal(), dtype=np.float32))
    return made


def reference_logprobs(model: Any, made: TrainBatch) -> list[NDArray[np.float64]]:
    """Each sequence alone through transformers; unmasked entries 0."""
    result = []
    for tokens, mask in zip(made.tokens, made.loss_mask, strict=True):
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1].float() / made.temperature
        logp = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
        result.append(np.concatenate([[0.0], logp]) * (mask > 0))
    return result
