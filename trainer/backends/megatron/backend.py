"""Training with Megatron-core."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from numpy.typing import NDArray
from torch import Tensor

from titogym.errors import UserError
from titogym.trainer.backends import hf_directory, versions
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.megatron import checkpoint, compat, hf_weights, parallel
from titogym.trainer.backends.megatron.model import build, expert_count
from titogym.trainer.backends.megatron.replay import Replay
from titogym.trainer.backends.packing import Members, Microbatch, microbatches, scatter
from titogym.trainer.backends.schedule import learning_rate
from titogym.trainer.batch import TrainBatch
from titogym.trainer.losses import batch_loss, combine_metrics

# Log-probs of a microbatch's scored tokens, their entropies and values where there are such, `[m]`.
Scores = tuple[Tensor, Tensor | None, Tensor | None]
# One microbatch's share of the loss of the whole batch, with metrics.
LossFunction = Callable[[Microbatch, Scores], tuple[Tensor, dict[str, float]]]


class MegatronBackend:
    """See `Backend`. Built empty: `load_hf` or `init_random` comes first.

    With more than one rank every method is a collective operation: all ranks call it with the same
    arguments, and all get the same result.
    """

    def __init__(self, spec: BackendSpec) -> None:
        self.spec = spec
        self.step = 0
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        torch.use_deterministic_algorithms(spec.deterministic)

    def load_hf(self, model_dir: Path) -> None:
        self._build(hf_directory.read_config(model_dir), model_dir)
        hf_weights.import_weights(self.model, model_dir, self._config)
        if self.spec.reference:
            self._reference = [parameter.detach().clone() for parameter in self.model.parameters()]
        self._make_optimizer()

    def init_random(self, config: Mapping[str, Any], seed: int, tokenizer_dir: Path | None = None) -> None:
        self._build(config, tokenizer_dir)
        hf_weights.initialize(self.model, self._config, seed)
        self._make_optimizer()

    def logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        return self._score(batch, 0)

    def reference_logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        if self._reference is None:
            raise ValueError("the backend was built without BackendSpec.reference, or not by load_hf")
        with self._weights(self._reference):
            return self.logprobs(batch)

    def values(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        if not self.spec.value_head:
            raise ValueError("the backend was built without BackendSpec.value_head")
        return self._score(batch, -1)

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        total = float(sum(mask.sum(dtype=np.float64) for mask in batch.loss_mask))

        def loss(micro: Microbatch, scores: Scores) -> tuple[Tensor, dict[str, float]]:
            return batch_loss(batch, micro.gather, micro.sequences(), scores, self.spec.loss, total)

        lr = learning_rate(self.step, self.spec.optimizer)
        parts, metrics = self._optimize(self._microbatches(batch), batch.temperature, loss, lr)
        return combine_metrics(parts) | metrics

    def supervised_step(
        self, tokens: Sequence[NDArray[np.int32]], loss_mask: Sequence[NDArray[np.float32]], lr: float
    ) -> dict[str, float]:
        total = float(sum(mask.sum(dtype=np.float64) for mask in loss_mask))

        def loss(micro: Microbatch, scores: Scores) -> tuple[Tensor, dict[str, float]]:
            share = -(scores[0] * micro.gather(loss_mask)).sum() / total
            return share, {"loss": float(share.detach())}

        micros = microbatches(
            tokens, loss_mask, self.spec.microbatch_tokens, self._device, parallel.my_share()
        )
        parts, metrics = self._optimize(micros, 1.0, loss, lr)
        return metrics | {"loss/nll": sum(part["loss"] for part in parts)}

    def export(self) -> Iterator[tuple[str, Tensor]]:
        return hf_weights.export_weights(self.model, self._config)

    def save(self, path: Path) -> None:
        def write(version: Path) -> None:
            checkpoint.write(version, self.model, self._optimizer)

        versions.save(path, self.step, self._config, write)

    def load(self, path: Path) -> None:
        version, step = versions.latest(path, self._config)
        checkpoint.read(version, self.model, self._optimizer, step)
        self.step = step

    def save_hf(self, model_dir: Path) -> None:
        if dist.get_rank() == 0:
            config = {**self._config, "dtype": self.spec.dtype}
            hf_directory.write_companions(model_dir, config, self._source)
        hf_weights.write_weights(self.model, self._config, model_dir)

    def _build(self, config: Mapping[str, Any], source: Path | None) -> None:
        parallel.join_world(self.spec)
        parallel.arrange(self.spec.layout, self.spec.timeout)
        with compat.on_this_device():
            self.model = build(config, self.spec).to(self._device)
        self._replay = Replay(self.model)
        self._config = hf_directory.without_dtype(config)
        self._reference: list[Tensor] | None = None
        self._source = source
        self.step = 0
        if self.spec.replay_routes and not expert_count(config):
            raise UserError("trainer.r3 replays the experts of a mixture-of-experts model: set it to false")

    def _make_optimizer(self) -> None:
        """Gradient buffers and AdamW over the model's present weights."""
        decoder, settings = self.model.config, self.spec.optimizer
        module = Float16Module(decoder, self.model) if decoder.bf16 else self.model
        self._module = DistributedDataParallel(
            decoder,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            module,
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
                    params_dtype=decoder.params_dtype,
                    bf16=decoder.bf16,
                    use_distributed_optimizer=True,
                ),
                [self._module],
            )

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

    def _microbatches(self, batch: TrainBatch) -> list[Microbatch]:
        routes = None
        if self.spec.replay_routes:
            if batch.routes is None:
                raise ValueError("the batch has no expert routes to replay")
            routes = batch.routes
            wanted = (self._config["num_hidden_layers"], self._config["num_experts_per_tok"])
            for i, rows in enumerate(routes):
                if rows.shape[1:] != wanted:
                    raise ValueError(
                        f"the expert routes of sequence {i} are {rows.shape[1:]} per token, not {wanted}"
                    )
        return microbatches(
            batch.tokens,
            batch.loss_mask,
            self.spec.microbatch_tokens,
            self._device,
            parallel.my_share(),
            routes,
        )

    def _score(self, batch: TrainBatch, column: int) -> list[NDArray[np.float32]]:
        result: list[NDArray[np.float32]] = [np.zeros(len(row), dtype=np.float32) for row in batch.tokens]

        def keep(micro: Microbatch, scores: Tensor) -> tuple[Members, NDArray[np.float32]]:
            return micro.members, parallel.whole(scores, micro)[:, column].float().cpu().numpy()

        scored = self._passes(self._microbatches(batch), batch.temperature, keep, forward_only=True)
        self._replay.take_counts()
        for members, values in parallel.collect(scored):
            scatter(members, values, result)
        return result

    def _optimize(
        self, micros: Sequence[Microbatch], temperature: float, loss_function: LossFunction, lr: float
    ) -> tuple[list[dict[str, float]], dict[str, float]]:
        """Accumulate gradients over the microbatches and take one step. Returns both kinds of metrics."""
        start = time.perf_counter()
        if not micros:
            raise ValueError("no token of the batch carries loss")
        self._module.zero_grad_buffer()
        self._optimizer.zero_grad()

        def loss(micro: Microbatch, scores: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
            scores = parallel.whole(scores, micro)
            part: dict[str, float] = {}
            share = scores.sum()  # of a microbatch that scores nothing
            if micro.scored:
                share, part = loss_function(micro, self._columns(scores))
            return share, torch.ones((), dtype=torch.int), part

        parts = self._passes(micros, temperature, loss, forward_only=False)
        parts = [part for part in parallel.collect(parts) if part]
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
        metrics = {
            "optimizer/grad_norm": float(grad_norm),
            "optimizer/lr": lr,
            "trainer/tokens": float(parallel.tokens_of_all(micros)),
            "trainer/microbatches": float(len(parts)),
            "trainer/step_seconds": time.perf_counter() - start,
        }
        if self.spec.replay_routes:
            recorded, own, taken = parallel.added_up(self._replay.take_counts()).tolist()
            metrics |= {"r3/own_agreement": own / recorded, "r3/agreement": taken / recorded}
        return parts, metrics

    def _passes(
        self,
        micros: Sequence[Microbatch],
        temperature: float,
        on_scores: Callable[[Microbatch, Tensor], Any],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """All microbatches through the pipeline, backward too unless `forward_only`.

        `on_scores` is called on the last stage; returns what it returned, the last element of tuples.
        """
        if not micros:
            return []
        with_entropy = not forward_only and self.spec.loss.needs_entropy

        def forward(data: Iterator[Microbatch], module: Any) -> tuple[Tensor, Callable[..., Any]]:
            micro = next(data)
            packing = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=micro.bounds,
                cu_seqlens_kv=micro.bounds,
                max_seqlen_q=micro.longest,
                max_seqlen_kv=micro.longest,
            )
            with self._replay.forward(micro):
                output = module(micro.tokens, packing, micro.where, micro.targets, temperature, with_entropy)

            def after(scores: Tensor, non_loss_data: bool = False) -> Any:
                return on_scores(micro, scores)

            return output, after

        with torch.set_grad_enabled(not forward_only):
            results: list[Any] = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(micros),
                model=[self._module],
                num_microbatches=len(micros),
                seq_length=1,  # every stage tells the next how long each microbatch is
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        return results

    def _columns(self, scores: Tensor) -> Scores:
        entropy = scores[:, 1] if self.spec.loss.needs_entropy else None
        return scores[:, 0], entropy, scores[:, -1] if self.spec.value_head else None
