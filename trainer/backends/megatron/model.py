"""From a Hugging Face config.json to a Megatron GPTModel that scores tokens."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.megatron.attention import PackedCausalAttention
from titogym.trainer.backends.megatron.norm import RMSNorm
from titogym.trainer.backends.megatron.support import (
    ARCHITECTURES,
    check_layout,
    check_supported,
    expert_count,
    moe_layers,
    rope,
)


def transformer_config(config: Mapping[str, Any], spec: BackendSpec) -> TransformerConfig:
    """Megatron's description of the decoder layers. Fusions that need CUDA extensions are off."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    layout, dtype = spec.layout, getattr(torch, spec.dtype)
    experts: dict[str, Any] = {}
    if expert_count(config):
        experts = {
            "num_moe_experts": expert_count(config),
            "moe_layer_freq": [int(moe) for moe in moe_layers(config)],
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_ffn_hidden_size": config["moe_intermediate_size"],
            # softmax over all experts and no division by the sum of those taken, or over those taken alone
            "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": False,
        }
    recomputed: dict[str, Any] = {}
    if spec.recompute:
        recomputed = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
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
        perform_initialization=False,  # weights come from a file or from `hf_weights.initialize`
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor or layout.tensor,
        sequence_parallel=layout.tensor > 1,
        pipeline_dtype=dtype,
        variable_seq_lengths=True,  # microbatches are as long as what is packed into them
        calculate_per_token_loss=True,  # gradients are summed over ranks: `backend` divides the loss itself
        moe_token_dispatcher_type="alltoall",
        deterministic_mode=spec.deterministic,
        **experts,
        **recomputed,
    )


class PolicyModel(GPTModel):  # type: ignore[misc]
    """A GPTModel over packed sequences whose output scores chosen tokens.

    Logits, by far the largest activation, exist only for the positions that are asked for.
    """

    def __init__(self, *arguments: Any, value_head: bool, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        if self.post_process and self.config.sequence_parallel:
            # `forward` gathers the hidden states itself, before it picks positions
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = True
        self.value_head = None
        if value_head and self.post_process:
            self.value_head = torch.nn.Linear(
                self.config.hidden_size, 1, bias=False, dtype=self.config.params_dtype
            )
            torch.nn.init.zeros_(self.value_head.weight)

    def forward(
        self,
        tokens: Tensor,
        packing: PackedSeqParams,
        where: Tensor,
        targets: Tensor,
        temperature: float,
        with_entropy: bool = False,
    ) -> Tensor:
        """Scores of `targets[i]` as the token that follows position `where[i]`, `[m, columns]` in fp32.

        Column 0 is its log-prob; then, where asked for, the entropy of the whole distribution, and the
        value head's value. `tokens` is `[1, t]`; `where` and `targets` are `[m]`. Logits are divided by
        `temperature` first. On a pipeline stage before the last: the hidden states.
        """
        hidden, rotary, *_ = self._preprocess(tokens, None, packed_seq_params=packing)
        hidden = self.decoder(hidden, None, rotary_pos_emb=rotary, packed_seq_params=packing)
        if not self.post_process:
            return hidden  # type: ignore[no-any-return]
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        hidden = hidden[where]
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else None
        logits, _ = self.output_layer(hidden, weight=weight)
        logits = logits[:, 0].float()
        if temperature != 1.0:
            logits = logits / temperature
        columns = []
        if with_entropy:  # before the cross entropy, which overwrites the logits
            columns.append(_entropy(logits))
            logits = logits.clone()
        columns.insert(0, -vocab_parallel_cross_entropy(logits, targets))
        if self.value_head is not None:
            columns.append(self.value_head(hidden[:, 0]).float()[:, 0])
        return torch.stack(columns, dim=1)


def _entropy(logits: Tensor) -> Tensor:
    """Entropy (nats) of distributions whose logits `[m, v]` are cut over tensor-parallel ranks, `[m]`."""
    group = parallel_state.get_tensor_model_parallel_group()
    if len(logits) == 0:
        return logits.sum(dim=1)
    top = logits.detach().max(dim=1, keepdim=True).values
    torch.distributed.all_reduce(top, torch.distributed.ReduceOp.MAX, group=group)
    shifted = logits - top
    weights = shifted.exp()
    sums = torch.stack([weights.sum(dim=1), (weights * shifted).sum(dim=1)])
    total, mean = reduce_from_tensor_model_parallel_region(sums)
    entropy: Tensor = total.log() - mean / total
    return entropy


def build(config: Mapping[str, Any], spec: BackendSpec) -> PolicyModel:
    """This rank's part of the model that `config` describes, its weights not yet set.

    Raises `UserError` where the model or its layout is not supported.
    """
    check_supported(config)
    check_layout(config, spec.layout)
    decoder = transformer_config(config, spec)
    rotary = rope(config)
    model = PolicyModel(
        decoder,
        _layers(decoder),
        vocab_size=config["vocab_size"],
        max_sequence_length=config.get("max_position_embeddings", 2048),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config.get("tie_word_embeddings", False),
        position_embedding_type="rope",
        rotary_base=rotary["rope_theta"],
        rope_scaling=rotary["rope_type"] == "llama3",
        rope_scaling_factor=rotary.get("factor", 1.0),
        value_head=spec.value_head,
    )
    _mark_cut_weights(model)
    return model


def _mark_cut_weights(model: PolicyModel) -> None:
    """Tell shards from copies, as the norm of the gradient needs; megatron does so when it draws weights."""
    for module in model.modules():
        cut = isinstance(module, ColumnParallelLinear | VocabParallelEmbedding | RowParallelLinear)
        if cut and module.weight is not None:  # None: the output layer takes the tied matrix
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            set_tensor_model_parallel_attributes(module.weight, True, dim, 1)


def _layers(decoder: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's own layers with the attention and the norms of this package."""
    if decoder.num_moe_experts is None:
        decoder.moe_layer_freq = [0] * decoder.num_layers
    # its stand-in for the norm refuses sequence parallelism already when it is looked up
    block = get_gpt_decoder_block_spec(decoder, use_transformer_engine=False, normalization="RMSNorm")
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = PackedCausalAttention
        if decoder.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    block.layer_norm = RMSNorm
    return block
