"""The trainer process: a backend that answers calls from a pipe. Started by `process.TrainerProcess`."""

import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from titogym.trainer.backends.base import Backend, BackendSpec
from titogym.trainer.backends.ranks import RanksLost, Team, attempt
from titogym.trainer.sft import Example, SftConfig, sft
from titogym.trainer.weights.settings import WeightSettings
from titogym.trainer.weights.update import WeightUpdates

PREFLIGHT = "preflight"  # what engines call the weights of the check; no published version is called so
# name -> class of the backend
BACKENDS = {
    "megatron": "titogym.trainer.backends.megatron.backend.MegatronBackend",
    "fsdp": "titogym.trainer.backends.fsdp.backend.FsdpBackend",
}


class Worker:
    """One method per call that may come through the pipe; those of `Backend` are passed on."""

    FORWARDED = frozenset(
        {
            "load_hf",
            "init_random",
            "logprobs",
            "reference_logprobs",
            "values",
            "train_step",
            "save",
            "load",
            "save_hf",
        }
    )

    def __init__(self, spec: BackendSpec, send: Callable[[object], None]) -> None:
        module, _, name = BACKENDS[spec.backend].rpartition(".")
        self._backend: Backend = getattr(import_module(module), name)(spec)
        self._send = send
        self._first = os.environ.get("RANK", "0") == "0"
        self._weights: WeightUpdates | None = None

    def answer(self, method: str, arguments: Sequence[Any]) -> Any:
        if method in self.FORWARDED:
            return getattr(self._backend, method)(*arguments)
        own: dict[str, Callable[..., Any]] = {
            "step": lambda: self._backend.step,
            "sft": self._sft,
            "connect_engines": self._connect,
            "publish_weights": self._publish,
            "check_weight_update": self._check,
        }
        return own[method](*arguments)

    def _sft(self, examples: Sequence[Example], config: SftConfig) -> dict[str, float]:
        def report(step: int, steps: int, metrics: dict[str, float]) -> None:
            if self._first:
                self._send(("progress", (step, steps, metrics)))

        return sft(self._backend, examples, config, report)

    def _connect(self, urls: Sequence[str], settings: WeightSettings) -> None:
        if not self._first:
            return
        if self._weights is not None:
            self._weights.close()
        self._weights = WeightUpdates(urls, settings)
        self._weights.connect()

    def _publish(self, version: int) -> dict[str, float]:
        if not self._first:
            return self._export_along()
        return self._connected().publish(self._backend.export(), str(version))

    def _check(self) -> dict[str, float]:
        if not self._first:
            return self._export_along()
        return self._connected().check(list(self._backend.export()), PREFLIGHT)

    def _export_along(self) -> dict[str, float]:
        """Every rank has a part in the export; rank 0 alone sends what comes of it."""
        for _ in self._backend.export():
            pass
        return {}

    def _connected(self) -> WeightUpdates:
        if self._weights is None:
            raise RuntimeError("connect_engines comes before any weight update")
        return self._weights


def main(descriptor: int, log: Path | None) -> None:
    """Serve calls until the other end closes. The first message is the spec; no backend, no service.

    Rank 0, which the driver starts, answers with how all ranks have ended the call; the others, which rank 0
    starts, with how they did.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    connection = Connection(descriptor)
    sending = threading.Lock()

    def send(message: object) -> None:
        with sending:
            connection.send(message)

    def give_up(why: str) -> None:
        send(("lost", why))
        os._exit(1)

    with suppress(EOFError, ConnectionError):
        spec: BackendSpec = connection.recv()
        team = Team(spec, log, give_up) if log is not None and spec.layout.world > 1 else None
        leads = "RANK" not in os.environ or os.environ["RANK"] == "0"
        worker: Worker | None = None

        def begin() -> None:
            nonlocal worker
            worker = Worker(spec, send)

        outcome = attempt(begin)
        while True:
            try:
                kind, value = team.agree(outcome) if team is not None else outcome
            except RanksLost as error:
                give_up(str(error))
            send((kind, value if leads else None) if kind == "result" else (kind, value))
            if worker is None:
                return
            message = connection.recv()
            if team is not None:
                team.call(message)
            outcome = attempt(partial(worker.answer, *message))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
