"""What is the same in every backend: from a batch to one optimizer step, and from a batch to scores."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titogym.errors import UserError
from titogym.trainer.backends import hf_directory, versions
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.packing import Members, Microbatch, Share, length, microbatches, scatter
from titogym.trainer.backends.schedule import learning_rate
from titogym.trainer.batch import TrainBatch
from titogym.trainer.learning.losses import batch_loss, combine_metrics

# Log-probs of a microbatch's scored tokens, their entropies and values where there are such, `[m]`.
Scores = tuple[Tensor, Tensor | None, Tensor | None]
# One microbatch's share of the loss of the whole batch, with metrics.
LossFunction = Callable[[Microbatch, Scores], tuple[Tensor, dict[str, float]]]


class SteppingBackend(ABC):
    """`Backend` over packed microbatches. Built empty: `load_hf` or `init_random` comes first.

    With more than one rank every method is a collective operation: all ranks call it with the same
    arguments, and all get the same result.

    A model scores a microbatch as `[m, columns]`: log-probs; entropies, where `needs_entropy` and gradients
    are wanted; values, where there is a value head.
    """

    EXACT = False  # whether it can compute as a true on-policy engine does

    def __init__(self, spec: BackendSpec) -> None:
        self.spec = spec
        self.step = 0
        self._device = torch.device("cpu")
        self._config: dict[str, Any] = {}  # of the model's config.json
        self._source: Path | None = None  # directory with its tokenizer
        self._reference: list[Tensor] | None = None
        if spec.true_on_policy and not self.EXACT:
            raise UserError('trainer.true_on_policy needs trainer.backend = "fsdp"')
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        torch.use_deterministic_algorithms(spec.deterministic)

    def load_hf(self, model_dir: Path) -> None:
        self._begin(hf_directory.read_config(model_dir), model_dir)
        self._read_weights(model_dir)
        if self.spec.reference:
            self._reference = [parameter.detach().clone() for parameter in self._parameters()]
        self._make_optimizer()

    def init_random(self, config: Mapping[str, Any], seed: int, tokenizer_dir: Path | None = None) -> None:
        self._begin(config, tokenizer_dir)
        self._draw_weights(seed)
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
        total = _total(batch.loss_mask)

        def loss(micro: Microbatch, scores: Scores) -> tuple[Tensor, dict[str, float]]:
            return batch_loss(batch, micro.gather, micro.sequences(), scores, self.spec.loss, total)

        lr = learning_rate(self.step, self.spec.optimizer)
        parts, metrics = self._optimize(
            self._microbatches(batch), batch.loss_mask, batch.temperature, loss, lr
        )
        return combine_metrics(parts) | metrics

    def supervised_step(
        self, tokens: Sequence[NDArray[np.int32]], loss_mask: Sequence[NDArray[np.float32]], lr: float
    ) -> dict[str, float]:
        total = _total(loss_mask)

        def loss(micro: Microbatch, scores: Scores) -> tuple[Tensor, dict[str, float]]:
            share = -(scores[0] * micro.gather(loss_mask)).sum() / total
            return share, {"loss": float(share.detach())}

        micros = microbatches(tokens, loss_mask, self._budget(), self._device, self._share())
        parts, metrics = self._optimize(micros, loss_mask, 1.0, loss, lr)
        return metrics | {"loss/nll": sum(part["loss"] for part in parts)}

    def save(self, path: Path) -> None:
        versions.save(path, self.step, self._config, self._write)

    def load(self, path: Path) -> None:
        version, step = versions.latest(path, self._config)
        self._read(version, step)
        self.step = step

    def _begin(self, config: Mapping[str, Any], source: Path | None) -> None:
        """Build the model that `config` describes, its weights not yet set."""
        self._device = self._build(config)
        self._config = hf_directory.without_dtype(config)
        self._source = source
        self._reference = None
        self.step = 0

    def _microbatches(self, batch: TrainBatch) -> list[Microbatch]:
        routes = self._routes(batch) if self.spec.replay_routes else None
        return microbatches(
            batch.tokens,
            batch.loss_mask,
            self._budget(),
            self._device,
            self._share(),
            routes,
        )

    def _budget(self) -> int:
        """Most tokens in a microbatch. Exact attention takes one sequence at a time."""
        return 1 if self.spec.true_on_policy else self.spec.microbatch_tokens

    def _routes(self, batch: TrainBatch) -> list[NDArray[Any]]:
        """The recorded experts of `batch`. Raises `ValueError` unless they are those of this model."""
        if batch.routes is None:
            raise ValueError("the batch has no expert routes to replay")
        wanted = (self._config["num_hidden_layers"], self._config["num_experts_per_tok"])
        for i, rows in enumerate(batch.routes):
            if rows.shape[1:] != wanted:
                raise ValueError(
                    f"the expert routes of sequence {i} are {rows.shape[1:]} per token, not {wanted}"
                )
        return list(batch.routes)

    def _score(self, batch: TrainBatch, column: int) -> list[NDArray[np.float32]]:
        result: list[NDArray[np.float32]] = [np.zeros(len(row), dtype=np.float32) for row in batch.tokens]
        for members, scores in self._forward(self._microbatches(batch), batch.temperature):
            scatter(members, scores[:, column], result)
        return result

    def _optimize(
        self,
        micros: Sequence[Microbatch],
        loss_mask: Sequence[NDArray[np.float32]],
        temperature: float,
        loss_function: LossFunction,
        lr: float,
    ) -> tuple[list[dict[str, float]], dict[str, float]]:
        """Accumulate gradients over the microbatches and take one step. Returns both kinds of metrics."""
        start = time.perf_counter()
        if not micros:
            raise ValueError("no token of the batch carries loss")

        def loss(micro: Microbatch, scores: Tensor) -> tuple[Tensor, dict[str, float]]:
            if not micro.scored:
                return scores.sum(), {}
            entropy = scores[:, 1] if self.spec.loss.needs_entropy else None
            return loss_function(
                micro, (scores[:, 0], entropy, scores[:, -1] if self.spec.value_head else None)
            )

        parts = [part for part in self._accumulate(micros, temperature, loss) if part]
        if self.spec.true_on_policy:
            _check_exact(parts)
        grad_norm = self._update(lr)
        if not math.isfinite(grad_norm):
            raise UserError(
                f"The gradient norm of step {self.step} is {grad_norm} and the weights are lost: resume from "
                "the last checkpoint with a lower optimizer.lr"
            )
        self.step += 1
        return parts, {
            "optimizer/grad_norm": grad_norm,
            "optimizer/lr": lr,
            "trainer/tokens": float(sum(length(mask) for mask in loss_mask)),
            "trainer/microbatches": float(len(parts)),
            "trainer/step_seconds": time.perf_counter() - start,
        } | self._further_metrics()

    @contextmanager
    @torch.no_grad()
    def _weights(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """The model has other weights while the block runs."""
        parameters = self._parameters()
        held = [parameter.detach().clone() for parameter in parameters]
        try:
            for parameter, other in zip(parameters, weights, strict=True):
                parameter.copy_(other)
            yield
        finally:
            for parameter, own in zip(parameters, held, strict=True):
                parameter.copy_(own)

    def _further_metrics(self) -> dict[str, float]:
        """Of the step just taken."""
        return {}

    @abstractmethod
    def export(self) -> Iterator[tuple[str, Tensor]]: ...

    @abstractmethod
    def _build(self, config: Mapping[str, Any]) -> torch.device:
        """Make the model, its weights not yet set. Returns the device of this rank."""

    @abstractmethod
    def _read_weights(self, model_dir: Path) -> None: ...

    @abstractmethod
    def _draw_weights(self, seed: int) -> None: ...

    @abstractmethod
    def _make_optimizer(self) -> None:
        """Over the model's present weights."""

    @abstractmethod
    def _parameters(self) -> list[Tensor]:
        """What this rank holds of the weights."""

    @abstractmethod
    def _share(self) -> Share: ...

    @abstractmethod
    def _forward(
        self, micros: Sequence[Microbatch], temperature: float
    ) -> list[tuple[Members, NDArray[np.float32]]]:
        """Scores `[m, columns]` of the microbatches of all ranks, without gradient."""

    @abstractmethod
    def _accumulate(
        self,
        micros: Sequence[Microbatch],
        temperature: float,
        loss: Callable[[Microbatch, Tensor], tuple[Tensor, dict[str, float]]],
    ) -> list[dict[str, float]]:
        """Set the gradients to those of the sum of `loss` over the microbatches of all ranks.

        Returns what `loss` returned for them beside the losses.
        """

    @abstractmethod
    def _update(self, lr: float) -> float:
        """Clip the gradients and take one step. Returns their norm before."""

    @abstractmethod
    def _write(self, version: Path) -> None:
        """Write weights and optimizer state to the directory `version`."""

    @abstractmethod
    def _read(self, version: Path, step: int) -> None:
        """Restore what `_write` has written after `step` steps."""


def _check_exact(parts: Sequence[Mapping[str, float]]) -> None:
    """Raise `UserError` before a step on data whose log-probs are not the engine's to the last bit."""
    gap = max((part.get("logprobs/gap_max", 0.0) for part in parts), default=0.0)
    if gap != 0:
        raise UserError(
            f"trainer.true_on_policy: the trainer's log-probs differ from the engine's by up to {gap:.3g}, "
            "not by 0. Engine and trainer no longer compute the same; the weights were not changed."
        )


def _total(loss_mask: Sequence[NDArray[np.float32]]) -> float:
    return float(sum(mask.sum(dtype=np.float64) for mask in loss_mask))
