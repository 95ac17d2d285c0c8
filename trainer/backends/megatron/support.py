"""Which models and layouts the Megatron backend has, and what a config.json says of them."""

from collections.abc import Mapping
from typing import Any

from titogym.errors import UserError
from titogym.trainer.backends.layout import Layout

# architecture -> whether queries and keys pass an RMSNorm
ARCHITECTURES = {"Qwen3ForCausalLM": True, "LlamaForCausalLM": False, "Qwen3MoeForCausalLM": True}

# What Megatron's llama3 frequency scaling holds as constants.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


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


def check_layout(config: Mapping[str, Any], layout: Layout) -> None:
    """Raise `UserError` for a model that cannot be cut as `layout` says."""
    if problem := layout.problem():
        raise UserError(f"The ranks cannot be arranged as {layout}: {problem}")
    heads = config["num_attention_heads"]
    experts = expert_count(config)
    if layout.expert > 1 and not experts:
        raise UserError("trainer.expert_parallel needs a mixture-of-experts model: set it to 1")
    expert_tensor = layout.expert_tensor or layout.tensor
    cuts = [
        ("num_attention_heads", heads, "tensor_parallel", layout.tensor),
        ("num_key_value_heads", config.get("num_key_value_heads") or heads, "tensor_parallel", layout.tensor),
        ("vocab_size", config["vocab_size"], "tensor_parallel", layout.tensor),
        ("intermediate_size", config["intermediate_size"], "tensor_parallel", layout.tensor),
        ("num_hidden_layers", config["num_hidden_layers"], "pipeline_parallel", layout.pipeline),
    ]
    if experts:
        cuts += [
            ("num_experts", experts, "expert_parallel", layout.expert),
            (
                "moe_intermediate_size",
                config["moe_intermediate_size"],
                "expert_tensor_parallel",
                expert_tensor,
            ),
        ]
    for key, size, name, ranks in cuts:
        if size % ranks:
            raise UserError(
                f"trainer.{name} = {ranks} does not divide the model's {key} = {size}: choose another"
            )


def expert_count(config: Mapping[str, Any]) -> int:
    """Experts of each layer that has them; 0 for a dense model. The key depends on transformers' version."""
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def moe_layers(config: Mapping[str, Any]) -> list[bool]:
    """Of each layer, whether it has experts."""
    count = config["num_hidden_layers"]
    if not expert_count(config):
        return [False] * count
    step, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or [])
    return [i not in dense and (i + 1) % step == 0 for i in range(count)]
