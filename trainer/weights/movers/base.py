"""What moves weights from the trainer to the engines."""

from collections.abc import Sequence
from typing import Protocol

from titogym.trainer.weights.prepare import Bucket


class Mover(Protocol):
    """One way for weights to travel. Every method raises `WeightUpdateError` and none hangs."""

    def connect(self) -> None:
        """Meet the engines. Once, before anything else."""
        ...

    def stage(self, buckets: Sequence[Bucket], version: str) -> dict[str, float]:
        """Bring the weights to where the engines can take them, while these go on generating.

        Returns figures of its own by their metrics' names. A mover whose engines receive straight into the
        weights that they serve has nothing to do here.
        """
        ...

    def activate(self, buckets: Sequence[Bucket], version: str, flush_cache: bool) -> None:
        """Let the paused engines serve the weights, as `version`; with `flush_cache` from an empty cache."""
        ...

    def close(self) -> None:
        """Let go of what `connect` opened, as far as the engines still answer. Safe to call twice."""
        ...
