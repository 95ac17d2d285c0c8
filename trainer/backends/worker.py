"""The trainer process: a backend that answers calls from a pipe. Started by `process.TrainerProcess`."""

import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from titogym.errors import UserError
from titogym.trainer.backends.base import Backend, BackendSpec
from titogym.trainer.sft import Example, SftConfig, sft
from titogym.trainer.weights.broadcast import WeightBroadcast
from titogym.trainer.weights.settings import BroadcastSettings

# name -> class of the backend
BACKENDS = {"megatron": "titogym.trainer.backends.megatron.backend.MegatronBackend"}


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

    def __init__(self, spec: BackendSpec, connection: Connection) -> None:
        module, _, name = BACKENDS[spec.backend].rpartition(".")
        self._backend: Backend = getattr(import_module(module), name)(spec)
        self._connection = connection
        self._weights: WeightBroadcast | None = None

    def answer(self, method: str, arguments: Sequence[Any]) -> Any:
        if method in self.FORWARDED:
            return getattr(self._backend, method)(*arguments)
        own: dict[str, Callable[..., Any]] = {
            "step": lambda: self._backend.step,
            "sft": self._sft,
            "connect_engines": self._connect,
            "publish_weights": self._publish,
        }
        return own[method](*arguments)

    def _sft(self, examples: Sequence[Example], config: SftConfig) -> dict[str, float]:
        def report(step: int, steps: int, metrics: dict[str, float]) -> None:
            self._connection.send(("progress", (step, steps, metrics)))

        return sft(self._backend, examples, config, report)

    def _connect(self, urls: Sequence[str], settings: BroadcastSettings) -> None:
        if self._weights is not None:
            self._weights.close()
        self._weights = WeightBroadcast(urls, settings)
        self._weights.connect()

    def _publish(self, version: int) -> dict[str, float]:
        if self._weights is None:
            raise RuntimeError("publish_weights before connect_engines")
        return self._weights.publish(self._backend.export(), str(version))


def main(descriptor: int) -> None:
    """Serve calls until the other end closes. The first message is the spec; no backend, no service."""
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    connection = Connection(descriptor)
    worker: Worker | None = None
    with suppress(EOFError, ConnectionError):
        while True:
            message = connection.recv()
            try:
                if worker is None:
                    worker = Worker(message, connection)
                    result = None
                else:
                    result = worker.answer(*message)
            except UserError as error:
                connection.send(("user_error", str(error)))
            except Exception as error:
                traceback.print_exc()
                connection.send(("error", f"{type(error).__name__}: {error}"))
            else:
                connection.send(("result", result))
            if worker is None:
                return


if __name__ == "__main__":
    main(int(sys.argv[1]))
