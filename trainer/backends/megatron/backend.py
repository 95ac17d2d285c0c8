"""Training with Megatron-core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from titogym.trainer.backends import hf_directory
from titogym.trainer.backends.megatron import checkpoint, compat, hf_weights, parallel
from titogym.trainer.backends.megatron.model import build
from titogym.trainer.backends.megatron.replay import Replay
from titogym.trainer.backends.megatron.support import expert_count
from titogym.trainer.backends.packing import Members, Microbatch, Share
from titogym.trainer.backends.steps import SteppingBackend
from titogym.trainer.backends.world import join_world


class MegatronBackend(SteppingBackend):
    """See `Backend` and `SteppingBackend`."""

    def export(self) -> Iterator[tuple[str, Tensor]]:
        return hf_weights.export_weights(self.model, self._config)

    def save_hf(self, model_dir: Path) -> None:
        if dist.get_rank() == 0:
            config = {**self._config, "dtype": self.spec.dtype}
            hf_directory.write_companions(model_dir, config, self._source)
        hf_weights.write_weights(self.model, self._config, model_dir)

    def _build(self, config: Mapping[str, Any]) -> torch.device:
        device = join_world(self.spec)
        parallel.arrange(self.spec.layout, self.spec.timeout)
        with compat.on_this_device():
            self.model = build(config, self.spec).to(device)
        if self.spec.replay_routes and not expert_count(config):
            raise UserError("trainer.r3 replays the experts of a mixture-of-experts model: set it to false")
        self._replay = Replay(self.model)
        return device

    def _read_weights(self, model_dir: Path) -> None:
        hf_weights.import_weights(self.model, model_dir, self._config)

    def _draw_weights(self, seed: int) -> None:
        hf_weights.initialize(self.model, self._config, seed)

    def _make_optimizer(self) -> None:
        """Gradient buffers, and AdamW whose state is cut over data-parallel ranks."""
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

    def _parameters(self) -> list[Tensor]:
        return list(self.model.parameters())

    def _share(self) -> Share:
        return parallel.my_share()

    def _forward(
        self, micros: Sequence[Microbatch], temperature: float
    ) -> list[tuple[Members, NDArray[np.float32]]]:
        def keep(micro: Microbatch, scores: Tensor) -> tuple[Members, NDArray[np.float32]]:
            return micro.members, parallel.whole(scores, micro).float().cpu().numpy()

        scored = self._passes(micros, temperature, keep, forward_only=True)
        self._replay.take_counts()
        return parallel.collect(scored)

    def _accumulate(
        self,
        micros: Sequence[Microbatch],
        temperature: float,
        loss: Callable[[Microbatch, Tensor], tuple[Tensor, dict[str, float]]],
    ) -> list[dict[str, float]]:
        def after(micro: Microbatch, scores: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
            share, part = loss(micro, parallel.whole(scores, micro))
            return share, torch.ones((), dtype=torch.int), part

        self._module.zero_grad_buffer()
        self._optimizer.zero_grad()
        parts = self._passes(micros, temperature, after, forward_only=False)
        finalize_model_grads([self._module], None)
        return parallel.collect(parts)

    def _update(self, lr: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
            # norms are not decayed: megatron gives their group the multiplier 0
            group["weight_decay"] = self.spec.optimizer.weight_decay * group.get("wd_mult", 1.0)
        with compat.on_this_device():
            _, grad_norm, _ = self._optimizer.step()
        return float(grad_norm)

    def _further_metrics(self) -> dict[str, float]:
        if not self.spec.replay_routes:
            return {}
        recorded, own, taken = parallel.added_up(self._replay.take_counts()).tolist()
        return {"r3/own_agreement": own / recorded, "r3/agreement": taken / recorded}

    def _write(self, version: Path) -> None:
        checkpoint.write(version, self.model, self._optimizer)

    def _read(self, version: Path, step: int) -> None:
        checkpoint.read(version, self.model, self._optimizer, step)

    def _passes(
        self,
        micros: Sequence[Microbatch],
        temperature: float,
        on_scores: Callable[[Microbatch, Tensor], Any],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """All microbatches through the pipeline, backward too unless `forward_only`.

        `on_scores` is called on the last stage; returns what it returned, the last element of tuples when
        there is a backward pass.
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
