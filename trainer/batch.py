"""What the trainer trains on: graded samples, and the groups that advantages compare."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Sample:
    """One graded training sequence of `n` tokens.

    `loss_mask`, `logprobs` have length `n`; entry `i` belongs to token `i` predicted from those before
    it, so entry 0 is always masked. `version_spans` are `(start, end, weight_version)` over positions.
    """

    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    version_spans: list[tuple[int, int, str]]
    reward: float
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Group:
    """The episodes of one task that advantages compare. A failed episode counts in `failures` only."""

    task_id: str
    samples: list[Sample]
    attempt: int = 0
    failures: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
