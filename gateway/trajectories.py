"""Training sequences cut from a session's token tree."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Trajectory:
    """One training sequence: the row from a root to a leaf, `n` tokens long.

    `loss_mask[i]` is 1 where token `i` was sampled by the model and carries loss in this trajectory;
    `logprobs[i]` is the engine's log-prob of token `i` given those before it, 0.0 where the mask is 0.
    `version_spans` are `(start, end, weight_version)` over token positions, covering sampled tokens only.
    """

    session_id: str
    leaf: str
    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    version_spans: list[tuple[int, int, str]]
    turns: int
    finish_reason: str
    reward: float | None = None
    routes: bytes | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
