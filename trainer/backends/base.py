"""What a training backend does. Implementations: `megatron.backend.MegatronBackend`.

A backend owns torch and, on a CPU, patches it: it lives in a process of its own, behind
`process.TrainerProcess`, which mirrors these methods for drivers that never import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from titogym.trainer.backends.layout import Layout
from titogym.trainer.batch import TrainBatch
from titogym.trainer.config.sections import LossConfig, OptimizerConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """How to train. Crosses a process boundary, so plain data only."""

    backend: str = "megatron"  # a name in `worker.BACKENDS`
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    dtype: Literal["float32", "bfloat16"] = "float32"
    microbatch_tokens: int = 16384  # most tokens in one forward and backward pass
    # CPU threads of one operation. One suits a trainer that shares the cores with an engine: threads that
    # wait for each other lose more to a busy neighbour than they gain. None: torch's choice, all cores.
    threads: int | None = None
    layout: Layout = field(default_factory=Layout)
    recompute: bool = False  # compute each layer's activations again in the backward pass, to save memory
    deterministic: bool = False  # only algorithms that give the same bits for the same input
    replay_routes: bool = False  # R3: the experts of `TrainBatch.routes` replace the routers' own choice
    true_on_policy: bool = False  # the engine's arithmetic; no step unless its log-probs are the same
    timeout: float = 600.0  # seconds that one rank may wait for another before the trainer gives up
    reference: bool = False  # keep the start model frozen beside the one in training
    value_head: bool = False  # a linear layer on the last hidden state that predicts returns


class Backend(Protocol):
    """One model with its optimizer."""

    step: int  # optimizer steps taken so far

    def load_hf(self, model_dir: Path) -> None:
        """Build the model of `model_dir` (config.json + safetensors) with a fresh optimizer.

        Raises `UserError` for an architecture or feature that the backend does not have.
        """
        ...

    def init_random(self, config: Mapping[str, Any], seed: int, tokenizer_dir: Path | None = None) -> None:
        """Build the model that the contents `config` of a config.json describe, with random weights.

        `save_hf` copies the tokenizer's files from `tokenizer_dir`. Raises as `load_hf`.
        """
        ...

    def logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        """Log-probs under the current weights, `[n_i]` per sequence; entry 0 and unmasked entries are 0."""
        ...

    def reference_logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        """As `logprobs`, under the weights that `load_hf` has read. Needs `BackendSpec.reference`."""
        ...

    def values(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        """`V(s_t)`, the return expected before token `t` is sampled, laid out as `logprobs`.

        Needs `BackendSpec.value_head`.
        """
        ...

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step on the whole batch. Returns loss, gradient norm, learning rate, timings (s)."""
        ...

    def supervised_step(
        self, tokens: Sequence[NDArray[np.int32]], loss_mask: Sequence[NDArray[np.float32]], lr: float
    ) -> dict[str, float]:
        """One optimizer step on the mean negative log-likelihood of the masked tokens.

        `loss_mask` holds weights as in `TrainBatch`. Returns `loss/nll` and what `train_step` returns
        of the optimizer.
        """
        ...

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight by its Hugging Face name, detached, in the training dtype. Tied copies appear once."""
        ...

    def save(self, path: Path) -> None:
        """Write weights, optimizer and step to `path`, atomically: a kill leaves the old or the new."""
        ...

    def load(self, path: Path) -> None:
        """Continue from what `save` wrote: the steps that follow are bit for bit those of an unbroken run."""
        ...

    def save_hf(self, model_dir: Path) -> None:
        """Write config.json, safetensors and the tokenizer's files, as transformers and SGLang read them."""
        ...
