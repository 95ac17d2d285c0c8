"""Who writes to whom, when several trainer ranks hold the weights and several engine ranks want them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transfer:
    """Source number `source` writes everything to target number `target`."""

    source: int
    target: int


def plan(sources: int, targets: int) -> list[Transfer]:
    """One transfer per target: the first `min(sources, targets)` one to one, the rest spread evenly.

    No source has two targets more than another. Raises `ValueError` without a source.
    """
    if sources < 1:
        raise ValueError("nobody holds the weights: there must be at least one source")
    return [Transfer(target % sources, target) for target in range(targets)]
