"""Asking all engines at once, and hearing of the first that fails as soon as it does.

Each is asked in a thread of its own, since during an update its answer often comes only when something has
happened on our side.
"""

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar
from urllib.parse import urlsplit

from titogym.gateway.engines.control import EngineControl

T = TypeVar("T")


class WeightUpdateError(Exception):
    """An engine could not be given the new weights. What its weights are now is not known."""


class Engines:
    """The SGLang servers at `urls`; `timeout` (s) bounds every question."""

    def __init__(self, urls: Sequence[str], timeout: float) -> None:
        self.timeout = timeout
        # The client waits a little longer than we do, so that it is we who say what was not done in time.
        self.controls = [EngineControl(url, timeout=timeout + 5) for url in urls]
        self._threads = ThreadPoolExecutor(max_workers=len(urls) + 1, thread_name_prefix="weights")

    def every(self, ask: Callable[[EngineControl], T]) -> list[T]:
        """Ask all of them at once; their answers in order. Raises `WeightUpdateError`."""
        return self.finish(self.start(ask))

    def start(self, ask: Callable[[EngineControl], T]) -> "list[Future[T]]":
        return [self._threads.submit(ask, engine) for engine in self.controls]

    def beside(self, work: Callable[[], T]) -> "Future[T]":
        """Do something of ours while the engines are being asked."""
        return self._threads.submit(work)

    def finish(self, calls: "Sequence[Future[T]]") -> list[T]:
        """The results of `calls`; the first failure is raised as soon as it is known."""
        done, _ = wait(calls, timeout=self.timeout, return_when=FIRST_EXCEPTION)
        for call in done:
            if error := call.exception():
                raise WeightUpdateError(f"The engines could not be given new weights: {error}") from error
        if len(done) < len(calls):
            raise WeightUpdateError(f"An engine did not answer within {self.timeout:.0f} s")
        return [call.result() for call in calls]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for engine in self.controls:
            engine.close()


def address_towards(url: str) -> str:
    """This machine's address on the interface from which `url` is reached."""
    return _ends(url)[0]


def is_local(url: str) -> bool:
    """Whether the server at `url` runs on this machine."""
    ours, theirs = _ends(url)
    return ours == theirs


def _ends(url: str) -> tuple[str, str]:
    target = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target.hostname, target.port or 80))  # sends nothing
        return str(probe.getsockname()[0]), str(probe.getpeername()[0])
