"""From a Hugging Face config.json to a Megatron GPTModel that returns log-probs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

from titogym.errors import UserError
from titogym.trainer.backends.megatron.attention import PackedCausalAttention

# architecture -> whether queries and keys pass an RMSNorm
ARCHITECTURES = {"Qwen3ForCausalLM": True, "LlamaForCausalLM": False}

# What Megatron's llama3 frequency scaling holds as constants.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_config(model_dir: Path) -> dict[str, Any]:
    """The config.json of `model_dir`. Raises `UserError` when it is missing or not JSON."""
    path = model_dir / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except OSError:
        raise UserError(f"{model_dir} has no config.json: give a Hugging Face model directory") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    return config


def rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings as one table, whether they stand in `rope_parameters` or in the two older keys."""
    table = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    table.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    table["rope_type"] = table.get("rope_type") or table.get("type") or "default"
    return table


def check_supported(config: Mapping[str, Any]) -> None:
    """Raise `UserError`, naming the feature, for a model that would not be computed faithfully."""
    names = config.get("architectures") or ["none"]
    if names[0] not in ARCHITECTURES:
        raise UserError(
            f"The Megatron backend does not have the architecture {names[0]}: use one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    rotary = rope(config)
    refused = {
        "attention_bias": config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
        "sliding-window attention": config.get("use_sliding_window", False)
        or any(kind != "full_attention" for kind in config.get("layer_types") or []),
        f"hidden_act {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "attention_dropout": config.get("attention_dropout", 0.0) != 0.0,
        f"rope_type {rotary['rope_type']!r}": rotary["rope_type"] not in ("default", "llama3"),
        "partial_rotary_factor": rotary.get("partial_rotary_factor", 1.0) != 1.0,
    }
    if rotary["rope_type"] == "llama3":
        for key, only in _LLAMA3_ROPE.items():
            refused[f"llama3 rope with {key} other than {only}"] = rotary.get(key) != only
    for feature, present in refused.items():
        if present:
            raise UserError(f"The Megatron backend does not have {feature}: choose a model without it")


def transformer_config(config: Mapping[str, Any], dtype: torch.dtype) -> TransformerConfig:
    """Megatron's description of the decoder layers. Fusions that need CUDA extensions are off."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        kv_channels=config.get("head_dim") or hidden // heads,
        ffn_hidden_size=config["intermediate_size"],
        normalization="RMSNorm",
        layernorm_epsilon=config.get("rms_norm_eps", 1e-6),
        qk_layernorm=ARCHITECTURES[config["architectures"][0]],
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,  # weights come from a file or from `hf_weights.random_weights`
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


class PolicyModel(GPTModel):  # type: ignore[misc]
    """A GPTModel over packed sequences whose output is the log-probs of chosen tokens.

    Logits, by far the largest activation, exist only for the positions that are asked for.
    """

    def forward(
        self, tokens: Tensor, packing: PackedSeqParams, where: Tensor, targets: Tensor, temperature: float
    ) -> Tensor:
        """Log-prob of `targets[i]` as the token that follows position `where[i]`, `[m]` in fp32.

        `tokens` is `[1, t]`; `where` and `targets` are `[m]`. Logits are divided by `temperature` first.
        """
        hidden, rotary, *_ = self._preprocess(tokens, None, packed_seq_params=packing)
        hidden = self.decoder(hidden, None, rotary_pos_emb=rotary, packed_seq_params=packing)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else None
        logits, _ = self.output_layer(hidden[where], weight=weight)
        logits = logits[:, 0].float()
        if temperature != 1.0:
            logits = logits / temperature
        nll: Tensor = vocab_parallel_cross_entropy(logits, targets)
        return -nll


def build(config: Mapping[str, Any], dtype: torch.dtype) -> PolicyModel:
    """The model that `config` describes, its weights not yet set. Raises `UserError` if not supported."""
    check_supported(config)
    decoder = transformer_config(config, dtype)
    spec = get_gpt_layer_local_spec(qk_layernorm=decoder.qk_layernorm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedCausalAttention
    rotary = rope(config)
    return PolicyModel(
        decoder,
        spec,
        vocab_size=config["vocab_size"],
        max_sequence_length=config.get("max_position_embeddings", 2048),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config.get("tie_word_embeddings", False),
        position_embedding_type="rope",
        rotary_base=rotary["rope_theta"],
        rope_scaling=rotary["rope_type"] == "llama3",
        rope_scaling_factor=rotary.get("factor", 1.0),
    )
