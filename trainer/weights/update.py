"""A weight update, whatever moves the bytes: prepare, stage, pause, activate, resume.

Only from the pause on do requests wait. What a mover can bring to the engines before that costs no
generation (`Mover.stage`).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from titogym.gateway.engines.digests import Weight, differing_weights
from titogym.trainer.weights.engines import Engines, WeightUpdateError
from titogym.trainer.weights.layout import contents
from titogym.trainer.weights.movers.base import Mover
from titogym.trainer.weights.movers.broadcast import Broadcast
from titogym.trainer.weights.movers.disk import Disk
from titogym.trainer.weights.movers.handoff import Handoff
from titogym.trainer.weights.movers.p2p import PeerToPeer
from titogym.trainer.weights.prepare import Named, buckets
from titogym.trainer.weights.settings import MoverName, WeightSettings

_MOVERS: dict[MoverName, Callable[[Engines, WeightSettings], Mover]] = {
    "broadcast": lambda engines, settings: Broadcast(engines),
    "handoff": lambda engines, settings: Handoff(engines),
    "disk": Disk,
    "p2p": PeerToPeer,
}
_NAMED_MOST = 8  # tensors that one message names


class WeightUpdates:
    """The engines at `urls` and the mover that serves them. Raises `WeightUpdateError` and never hangs."""

    def __init__(self, urls: Sequence[str], settings: WeightSettings) -> None:
        self._settings = settings
        self._engines = Engines(urls, settings.timeout)
        self._mover = _MOVERS[settings.mover](self._engines, settings)
        self._published: str | None = None  # what every engine must still have; None: nothing for certain

    def connect(self) -> None:
        self._mover.connect()

    def publish(self, tensors: Iterable[Named], version: str) -> dict[str, float]:
        """Install `tensors` (Hugging Face names) in every engine as weight version `version`.

        Returns `publish/<phase>_seconds` for each phase, the total, and what the mover tells, such as
        `publish/bytes`. Refuses engines that no longer have what was published last: what they sampled
        since is of weights that nobody here knows.
        """
        self._check_untouched()
        self._published = None
        figures: dict[str, float] = {}
        started = time.perf_counter()
        with _timed(figures, "prepare"):
            prepared = list(buckets(tensors, self._settings.bucket_bytes, self._settings.expert_factor))
        with _timed(figures, "stage"):
            figures |= self._mover.stage(prepared, version)
        with _timed(figures, "pause"):
            self._engines.every(lambda engine: engine.pause(self._settings.mode))
        with _timed(figures, "activate"):
            # No key or value of the old weights may serve the new ones, unless that was asked for.
            self._mover.activate(prepared, version, flush_cache=self._settings.mode != "in_place")
        with _timed(figures, "resume"):
            reports = self._engines.every(lambda engine: engine.info())
            for engine, info in zip(self._engines.controls, reports, strict=True):
                if (found := info.weight_version) != version:
                    raise WeightUpdateError(f"{engine.url} reports version {found!r}, was sent {version!r}")
            self._engines.every(lambda engine: engine.resume())
        self._published = version
        figures["publish/seconds"] = time.perf_counter() - started
        return figures

    def check(self, tensors: Sequence[Named], version: str) -> dict[str, float]:
        """`check-weight-update-equal`: fill the engines with noise, publish, and compare every tensor.

        Raises `WeightUpdateError` naming the tensors that did not arrive. Call before anything generates.
        `publish/tensors_checked` is 0 where an engine spreads its weights over ranks, whose digests say
        nothing about whole tensors: then this is a plain update.
        """
        if any(info.tensor_parallel > 1 for info in self._engines.every(lambda engine: engine.info())):
            return self.publish(tensors, version) | {"publish/tensors_checked": 0.0}
        self._engines.every(lambda engine: engine.randomize_weights())
        figures = self.publish(tensors, version)
        sent = [
            Weight(name, shape, data.data)
            for bucket in buckets(tensors, self._settings.bucket_bytes)
            for (name, data), shape in zip(contents([bucket]), bucket.shapes, strict=True)
        ]
        held = self._engines.every(lambda engine: engine.weight_digests())
        for engine, digests in zip(self._engines.controls, held, strict=True):
            if wrong := differing_weights(digests, sent):
                more = f" and {len(wrong) - _NAMED_MOST} more" if len(wrong) > _NAMED_MOST else ""
                raise WeightUpdateError(
                    f"After an update {engine.url} does not hold the trainer's weights; these of its tensors "
                    f"differ or did not arrive: {', '.join(wrong[:_NAMED_MOST])}{more}"
                )
        return figures | {"publish/tensors_checked": float(len(sent))}

    def _check_untouched(self) -> None:
        if self._published is None:
            return
        reports = self._engines.every(lambda engine: engine.info())
        for engine, info in zip(self._engines.controls, reports, strict=True):
            if (found := info.weight_version) != self._published:
                raise WeightUpdateError(
                    f"{engine.url} has weight version {found!r} in place of {self._published!r}: something "
                    "else updates this engine, or has started it again. Give every run engines of its own"
                )

    def close(self) -> None:
        self._mover.close()
        self._engines.close()


@contextmanager
def _timed(figures: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    figures[f"publish/{phase}_seconds"] = time.perf_counter() - start
