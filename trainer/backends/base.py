"""What a training backend does. Implementations: `megatron.backend.MegatronBackend`.

A backend owns torch and, on a CPU, patches it: it lives in a process of its own, behind
`process.TrainerProcess`, which mirrors these methods for drivers that never import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from titogym.trainer.batch import TrainBatch

if TYPE_CHECKING:
    import torch


class Backend(Protocol):
    """One model with its optimizer."""

    step: int  # optimizer steps taken so far

    def load_hf(self, model_dir: Path) -> None:
        """Build the model of `model_dir` (config.json + safetensors) with a fresh optimizer.

        Raises `UserError` for an architecture or feature that the backend does not have.
        """
        ...

    def logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        """Log-probs under the current weights, `[n_i]` per sequence; entry 0 and unmasked entries are 0."""
        ...

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step on the whole batch. Returns loss, gradient norm, learning rate, timings (s)."""
        ...

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight by its Hugging Face name, detached, in the training dtype. Tied copies appear once."""
        ...

    def save(self, path: Path) -> None:
        """Write weights, optimizer and step to `path`, atomically: a kill leaves the old content or the new."""
        ...

    def load(self, path: Path) -> None:
        """Continue from what `save` wrote: the steps that follow are bit for bit those of an unbroken run."""
        ...

    def save_hf(self, model_dir: Path) -> None:
        """Write config.json, safetensors and the tokenizer's files, as transformers and SGLang read them."""
        ...
