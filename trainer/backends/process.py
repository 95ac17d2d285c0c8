"""The trainer in a process of its own, driven by a process that never imports torch."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titogym import processes
from titogym.errors import UserError
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.batch import TrainBatch
from titogym.trainer.sft import Example, Report, SftConfig
from titogym.trainer.weights.settings import WeightSettings

_LAST_WORDS = 15.0  # seconds between the pipe's end and the process's, after which it is ended


class TrainerError(UserError):
    """The trainer failed at a call, or its process is gone. The message says which and where to look."""


class TrainerGone(TrainerError):
    """The trainer's process, or one of its ranks, is no more; another one may go on from a checkpoint."""


class TrainerProcess:
    """Mirrors `Backend` over a pipe, one call at a time; every call blocks.

    It is rank 0 of as many ranks as the spec's layout has; the others are its children.
    The process starts at once and loads torch while the caller goes on. It dies with this one, even by
    SIGKILL. Create it in the main thread. Every method raises `UserError` with the backend's sentence,
    `TrainerError` with its message, or `TrainerGone` with how the process ended.
    """

    def __init__(self, spec: BackendSpec, log: Path) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = processes.spawn(
                "trainer",
                [sys.executable, "-m", "titogym.trainer.backends.worker", str(theirs.fileno()), str(log)],
                log=log,
                env=_thread_settings(spec),
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self._lock = threading.Lock()
        self._started = False
        self._transmit(spec)

    @property
    def pid(self) -> int:
        return self._child.pid

    def alive(self) -> bool:
        return self._child.alive()

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
        """`titogym.trainer.sft.sft` in the trainer process; `report` is called in this one."""
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
        """End the process. A call that is in progress elsewhere fails. Safe to call twice."""
        self._child.stop()
        self._connection.close()

    def _call(self, method: str, *arguments: Any, report: Report | None = None) -> Any:
        with self._lock:
            if not self._started:
                self._receive(None)
                self._started = True
            self._transmit((method, arguments))
            return self._receive(report)

    def _transmit(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise self._gone() from None

    def _receive(self, report: Report | None) -> Any:
        while True:
            try:
                kind, value = self._connection.recv()
            except (EOFError, OSError):
                raise self._gone() from None
            if kind == "progress" and report is not None:
                report(*value)
            elif kind == "user_error":
                raise UserError(value)
            elif kind == "lost":
                self.close()
                raise TrainerGone(f"The trainer had to end: {value} (more in {self._child.log})")
            elif kind == "error":
                raise TrainerError(f"The trainer failed: {value} (more in {self._child.log})")
            elif kind == "result":
                return value

    def _gone(self) -> TrainerGone:
        with suppress(subprocess.TimeoutExpired):
            self._child.process.wait(_LAST_WORDS)
        self._child.stop()
        status = self._child.process.returncode
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return TrainerGone(
            f"The trainer process {how}; the end of {self._child.log}:\n{self._child.log_tail()}"
        )


def _thread_settings(spec: BackendSpec) -> dict[str, str]:
    """Threads that wait must not spin: engine, gateway and sandboxes share the cores with the trainer."""
    settings = {"OMP_WAIT_POLICY": "PASSIVE"}
    if spec.threads is not None:
        settings["OMP_NUM_THREADS"] = str(spec.threads)
    return settings
