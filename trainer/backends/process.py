"""The trainer in processes of its own, driven by a process that never imports torch."""

import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from titogym.errors import UserError
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.spawn import Spawned
from titogym.trainer.batch import TrainBatch
from titogym.trainer.learning.sft import Example, Report, SftConfig
from titogym.trainer.weights.settings import WeightSettings


class TrainerError(UserError):
    """The trainer failed at a call, or its process is gone. The message says which and where to look."""


class TrainerGone(TrainerError):
    """The trainer's process, or one of its ranks, is no more; another one may go on from a checkpoint."""


class Link(Protocol):
    """A trainer that was started, whoever started its ranks. Every method may be called from any thread."""

    @property
    def pid(self) -> int:
        """Of rank 0."""
        ...

    @property
    def output(self) -> str:
        """Where to read what the ranks have written."""
        ...

    def connection(self) -> Connection:
        """To rank 0, told the spec. Waits for the ranks; raises `TrainerError` when they do not come."""
        ...

    def alive(self) -> bool: ...

    def ending(self) -> str:
        """How it ended, asked once its connection has."""
        ...

    def stop(self, lost: bool = False) -> None:
        """End it. `lost`: something is amiss with it, so that another one may follow. Safe to call twice."""
        ...


class TrainerProcess:
    """Mirrors `Backend` over a connection, one call at a time; every call blocks.

    At the other end is rank 0 of as many ranks as the spec's layout has. Without a `link` it is a child of
    this process, and the other ranks are its children: it starts at once, loads torch while the caller goes
    on, and dies with this process, even by SIGKILL. Create it in the main thread.
    Every method raises `UserError` with the backend's sentence, `TrainerError` with its message, or
    `TrainerGone` with how the trainer ended.
    """

    def __init__(self, spec: BackendSpec, log: Path, link: Link | None = None) -> None:
        self._link = link or Spawned(spec, log)
        self._lock = threading.Lock()
        self._started = False

    @property
    def pid(self) -> int:
        return self._link.pid

    def alive(self) -> bool:
        return self._link.alive()

    def ending(self) -> str:
        """How it ended, for a person: asked when it is alive no more."""
        return self._link.ending()

    def load_hf(self, model_dir: Path) -> None:
        self._call("load_hf", model_dir)

    def init_random(self, config: Mapping[str, Any], seed: int, tokenizer_dir: Path | None = None) -> None:
        self._call("init_random", config, seed, tokenizer_dir)

    def logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        result: list[NDArray[np.float32]] = self._call("logprobs", batch)
        return result

    def reference_logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        result: list[NDArray[np.float32]] = self._call("reference_logprobs", batch)
        return result

    def values(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        result: list[NDArray[np.float32]] = self._call("values", batch)
        return result

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        metrics: dict[str, float] = self._call("train_step", batch)
        return metrics

    def sft(
        self,
        examples: Sequence[Example],
        config: SftConfig,
        report: Report = lambda step, steps, metrics: None,
    ) -> dict[str, float]:
        """`titogym.trainer.learning.sft.sft` in the trainer process; `report` is called in this one."""
        metrics: dict[str, float] = self._call("sft", examples, config, report=report)
        return metrics

    def step(self) -> int:
        step: int = self._call("step")
        return step

    def save(self, path: Path) -> None:
        self._call("save", path)

    def load(self, path: Path) -> None:
        self._call("load", path)

    def save_hf(self, model_dir: Path) -> None:
        self._call("save_hf", model_dir)

    def connect_engines(self, urls: Sequence[str], settings: WeightSettings | None = None) -> None:
        """Meet the SGLang servers at `urls` as the settings' mover does; replaces an earlier connection."""
        self._call("connect_engines", list(urls), settings or WeightSettings())

    def publish_weights(self, version: int) -> dict[str, float]:
        """Install the current weights in every engine as `version`. Returns seconds by phase and bytes."""
        figures: dict[str, float] = self._call("publish_weights", version)
        return figures

    def check_weight_update(self) -> dict[str, float]:
        """Send the weights over noise and compare every tensor: `titogym.trainer.weights.update`.

        Raises `TrainerError` naming those that differ.
        """
        figures: dict[str, float] = self._call("check_weight_update")
        return figures

    def close(self) -> None:
        """End the trainer. A call that is in progress elsewhere fails. Safe to call twice."""
        self._link.stop()

    def _call(self, method: str, *arguments: Any, report: Report | None = None) -> Any:
        with self._lock:
            connection = self._link.connection()
            if not self._started:
                self._receive(connection, None)
                self._started = True
            try:
                connection.send((method, arguments))
            except OSError:
                raise TrainerGone(self._link.ending()) from None
            return self._receive(connection, report)

    def _receive(self, connection: Connection, report: Report | None) -> Any:
        while True:
            try:
                kind, value = connection.recv()
            except (EOFError, OSError):
                raise TrainerGone(self._link.ending()) from None
            if kind == "progress" and report is not None:
                report(*value)
            elif kind == "user_error":
                raise UserError(value)
            elif kind == "lost":
                self._link.stop(lost=True)
                raise TrainerGone(f"The trainer had to end: {value} (more in {self._link.output})")
            elif kind == "error":
                raise TrainerError(f"The trainer failed: {value} (more in {self._link.output})")
            elif kind == "result":
                return value
