"""Training with Megatron-core: one rank, dense models."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from titogym.errors import UserError
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.megatron import checkpoint, compat, hf_weights
from titogym.trainer.backends.megatron.model import build, read_config
from titogym.trainer.backends.megatron.packing import Microbatch, microbatches
from titogym.trainer.batch import TrainBatch
from titogym.trainer.losses import batch_loss, combine_metrics

# What makes a saved model directory usable by transformers and SGLang beside weights and config.json.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)

# Log-probs of a microbatch's scored tokens, their entropies and values where there are such, `[m]`.
Scores = tuple[Tensor, Tensor | None, Tensor | None]
# One microbatch's share of the loss of the whole batch, with metrics.
LossFunction = Callable[[Microbatch, Scores], tuple[Tensor, dict[str, float]]]


class MegatronBackend:
    """See `Backend`. Built empty: `load_hf` or `init_random` comes first."""

    def __init__(self, spec: BackendSpec) -> None:
        self.spec = spec
        self.step = 0
        self._dtype = getattr(torch, spec.dtype)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)

    def load_hf(self, model_dir: Path) -> None:
        self._build(read_config(model_dir), model_dir)
        hf_weights.import_weights(self.model, model_dir)
        if self.spec.reference:
            self._reference = [parameter.detach().clone() for parameter in self.model.parameters()]
        self._make_optimizer()

    def init_random(self, config: Mapping[str, Any], seed: int, tokenizer_dir: Path | None = None) -> None:
        """Build the model that the contents `config` of a config.json describe, with random weights.

        `save_hf` copies the tokenizer's files from `tokenizer_dir`.
        """
        self._build(config, tokenizer_dir)
        hf_weights.initialize(self.model, seed, config.get("initializer_range", 0.02))
        self._make_optimizer()

    def logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        return self._score(batch, lambda scores: scores[0])

    def reference_logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        if self._reference is None:
            raise ValueError("the backend was built without BackendSpec.reference, or not by load_hf")
        with self._weights(self._reference):
            return self.logprobs(batch)

    def values(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        return self._score(batch, lambda scores: scores[2])

    @torch.no_grad()
    def _score(
        self, batch: TrainBatch, choose: Callable[[Scores], Tensor | None]
    ) -> list[NDArray[np.float32]]:
        result: list[NDArray[np.float32]] = [
            np.zeros(len(tokens), dtype=np.float32) for tokens in batch.tokens
        ]
        for micro in self._microbatches(batch.tokens, batch.loss_mask):
            chosen = choose(self._forward(micro, batch.temperature))
            if chosen is None:
                raise ValueError("the backend was built without BackendSpec.value_head")
            micro.scatter(chosen, result)
        return result

    @contextmanager
    @torch.no_grad()
    def _weights(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """The model has other weights while the block runs."""
        parameters = list(self.model.parameters())
        held = [parameter.detach().clone() for parameter in parameters]
        try:
            for parameter, other in zip(parameters, weights, strict=True):
                parameter.copy_(other)
            yield
        finally:
            for parameter, own in zip(parameters, held, strict=True):
                parameter.copy_(own)

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        total = float(sum(mask.sum(dtype=np.float64) for mask in batch.loss_mask))

        def loss(micro: Microbatch, scores: Scores) -> tuple[Tensor, dict[str, float]]:
            return batch_loss(batch, micro.gather, micro.sequences(), scores, self.spec.loss, total)

        settings = self.spec.optimizer
        lr = settings.lr * min(1.0, (self.step + 1) / max(settings.warmup_steps, 1))
        parts, metrics = self._optimize(batch.tokens, batch.loss_mask, batch.temperature, loss, lr)
        return combine_metrics(parts) | metrics

    def supervised_step(
        self, tokens: Sequence[NDArray[np.int32]], loss_mask: Sequence[NDArray[np.float32]], lr: float
    ) -> dict[str, float]:
        """One optimizer step on the mean negative log-likelihood of the masked tokens (weights, `[n_i]`)."""
        total = float(sum(mask.sum(dtype=np.float64) for mask in loss_mask))

        def loss(micro: Microbatch, scores: Scores) -> tuple[Tensor, dict[str, float]]:
            share = -(scores[0] * micro.gather(loss_mask)).sum() / total
            return share, {"loss": float(share.detach())}

        parts, metrics = self._optimize(tokens, loss_mask, 1.0, loss, lr)
        return metrics | {"loss/nll": sum(part["loss"] for part in parts)}

    def export(self) -> Iterator[tuple[str, Tensor]]:
        return hf_weights.export_weights(self.model)

    def save(self, path: Path) -> None:
        checkpoint.save(path, self.model, self._optimizer, self.step, self._config)

    def load(self, path: Path) -> None:
        self.step = checkpoint.load(path, self.model, self._optimizer, self._config)

    def save_hf(self, model_dir: Path) -> None:
        model_dir.mkdir(parents=True, exist_ok=True)
        checkpoint.write_json(model_dir / "config.json", {**self._config, "dtype": self.spec.dtype})
        hf_weights.write_weights(self.model, model_dir)
        if self._source is not None and self._source.resolve() != model_dir.resolve():
            for name in TOKENIZER_FILES:
                if (self._source / name).exists():
                    shutil.copyfile(self._source / name, model_dir / name)

    def _build(self, config: Mapping[str, Any], source: Path | None) -> None:
        _start_single_rank()
        self.model = build(config, self._dtype)
        if self.spec.value_head:
            self.model.add_value_head()
        self.model.to(self._device)
        self._reference: list[Tensor] | None = None
        self._config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
        self._source = source
        self.step = 0

    def _make_optimizer(self) -> None:
        """Gradient buffers and AdamW over the model's present weights."""
        decoder, settings = self.model.config, self.spec.optimizer
        module = Float16Module(decoder, self.model) if decoder.bf16 else self.model
        self._module = DistributedDataParallel(
            decoder, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module
        )
        with compat.on_this_device():
            self._optimizer = get_megatron_optimizer(
                MegatronOptimizerConfig(
                    optimizer="adam",
                    lr=settings.lr,
                    weight_decay=settings.weight_decay,
                    adam_beta1=settings.beta1,
                    adam_beta2=settings.beta2,
                    adam_eps=settings.eps,
                    clip_grad=settings.clip_grad,
                    params_dtype=self._dtype,
                    bf16=decoder.bf16,
                ),
                [self._module],
            )

    def _microbatches(
        self, tokens: Sequence[NDArray[np.int32]], loss_mask: Sequence[NDArray[np.float32]]
    ) -> Iterator[Microbatch]:
        return microbatches(tokens, loss_mask, self.spec.microbatch_tokens, self._device)

    def _forward(self, micro: Microbatch, temperature: float) -> Scores:
        entropy = torch.is_grad_enabled() and self.spec.loss.needs_entropy
        scores: Scores = self._module(
            micro.tokens, micro.packing, micro.where, micro.targets, temperature, entropy
        )
        return scores

    def _optimize(
        self,
        tokens: Sequence[NDArray[np.int32]],
        loss_mask: Sequence[NDArray[np.float32]],
        temperature: float,
        loss_function: LossFunction,
        lr: float,
    ) -> tuple[list[dict[str, float]], dict[str, float]]:
        """Accumulate gradients over the microbatches and take one step. Returns both kinds of metrics."""
        start = time.perf_counter()
        self._module.zero_grad_buffer()
        self._optimizer.zero_grad()
        parts, processed = [], 0
        for micro in self._microbatches(tokens, loss_mask):
            loss, part = loss_function(micro, self._forward(micro, temperature))
            torch.autograd.backward(loss)
            parts.append(part)
            processed += micro.tokens.numel()
        if not parts:
            raise ValueError("no token of the batch carries loss")
        finalize_model_grads([self._module], None)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
            # norms are not decayed: megatron gives their group the multiplier 0
            group["weight_decay"] = self.spec.optimizer.weight_decay * group.get("wd_mult", 1.0)
        with compat.on_this_device():
            _, grad_norm, _ = self._optimizer.step()
        if not math.isfinite(grad_norm):
            raise UserError(
                f"The gradient norm of step {self.step} is {grad_norm} and the weights are lost: resume from "
                "the last checkpoint with a lower optimizer.lr"
            )
        self.step += 1
        return parts, {
            "optimizer/grad_norm": float(grad_norm),
            "optimizer/lr": lr,
            "trainer/tokens": float(processed),
            "trainer/microbatches": float(len(parts)),
            "trainer/step_seconds": time.perf_counter() - start,
        }


def _start_single_rank() -> None:
    """A process group of one, with every parallel size 1. Once per process."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
