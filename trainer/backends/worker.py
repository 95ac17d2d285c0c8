"""A rank of the trainer: a backend that answers calls. `spawn` starts it, or torchrun."""

import argparse
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from titogym.errors import UserError
from titogym.processes import die_with_parent
from titogym.trainer.backends.base import Backend, BackendSpec
from titogym.trainer.backends.joining import join
from titogym.trainer.backends.meeting import Address, parse_address
from titogym.trainer.backends.ranks import Member, RanksLost, Team, attempt
from titogym.trainer.backends.spawn import children
from titogym.trainer.learning.sft import Example, SftConfig, sft
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


def serve(
    connection: Connection, others: Callable[[BackendSpec], Mapping[int, Member]] | None, host: str
) -> None:
    """Serve calls until the other end closes. The first message is the spec; no backend, no service.

    Rank 0, which the driver talks to, has the `others`, who know its machine as `host`, and answers with how
    all ranks have ended the call; they answer it with how they did.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    sending = threading.Lock()

    def send(message: object) -> None:
        with sending:
            connection.send(message)

    def give_up(why: str) -> NoReturn:
        send(("lost", why))
        os._exit(1)

    with suppress(EOFError, ConnectionError):
        spec: BackendSpec
        spec, place = connection.recv()
        os.environ |= place
        team: Team | None = None
        if others is not None:
            try:
                members = others(spec)
            except RanksLost as error:
                give_up(str(error))
            team = Team(spec, members, host, give_up) if members else None
        leads = os.environ.get("RANK", "0") == "0"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    ways = parser.add_subparsers(dest="way", required=True)
    pipe = ways.add_parser("pipe", help="be a child of the driver, or of rank 0")
    pipe.add_argument("descriptor", type=int, help="of the connection to the parent")
    pipe.add_argument("log", type=Path, nargs="?", help="of rank 0, beside which those of the others go")
    rank = ways.add_parser("join", help="be a rank that torchrun has started")
    rank.add_argument("driver", type=parse_address, help="HOST:PORT where the driver listens")
    rank.add_argument("key", type=Path, help="file with the key that the driver asks for")
    rank.add_argument("patience", type=float, help="seconds to try to reach the driver")
    options = parser.parse_args()
    if options.way == "join":
        _join(options.driver, options.key, options.patience)
    elif options.log is None:
        serve(Connection(options.descriptor), None, "")
    else:
        serve(
            Connection(options.descriptor),
            lambda spec: children(spec.layout.world, options.log),
            "127.0.0.1",
        )


def _join(driver: Address, key_file: Path, patience: float) -> None:
    if "RANK" not in os.environ:
        sys.exit("Start this program by torchrun, with the command that titogym train prints.")
    die_with_parent(os.getppid())  # torchrun, which may be killed
    try:
        joined = join(driver, key_file, patience)
    except UserError as error:
        sys.exit(str(error))
    serve(joined.calls, (lambda spec: joined.others()) if joined.leads else None, joined.host)
    joined.end()


if __name__ == "__main__":
    main()
