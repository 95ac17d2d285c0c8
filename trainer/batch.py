"""What the trainer trains on: graded samples, and the groups that advantages compare."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titogym.gateway.routes import Routes


@dataclass(slots=True)
class Sample:
    """One graded training sequence of `n` tokens.

    `loss_mask`, `logprobs` have length `n`; entry `i` belongs to token `i` predicted from those before
    it, so entry 0 is always masked. `version_spans` are `(start, end, weight_version)` over positions.
    Samples of one episode (a branched session gives several) share its number within the group.
    """

    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    version_spans: list[tuple[int, int, str]]
    reward: float
    episode: int = 0
    # Experts that each token but the last went through, `[n - 1, layers, top_k]`, where they were recorded.
    routes: NDArray[np.unsignedinteger] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


def route_array(routes: Routes) -> NDArray[np.unsignedinteger]:
    """`[rows, layers, top_k]`, as bytes hold it."""
    flat = np.frombuffer(routes.data, dtype=np.dtype(f"<u{routes.itemsize}"))
    return flat.reshape(-1, routes.layers, routes.top_k)


@dataclass(slots=True)
class Group:
    """The episodes of one task that advantages compare. A failed episode counts in `failures` only.

    `index` is the group's place in the run's task order: its identity. `attempt` counts how often it
    was sent round again because it had become stale. `failures` holds one cause per failed episode.
    """

    task_id: str
    samples: list[Sample]
    index: int = 0
    attempt: int = 0
    failures: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class TrainBatch:
    """`n` training sequences as a backend takes them; every list has one array per sequence of length `n_i`.

    Entry `t` of `loss_mask`, `rollout_logprobs`, `advantages` and `old_logprobs` belongs to token `t`
    predicted from those before it, so entry 0 carries no loss. `loss_mask` holds non-negative weights:
    the loss is `sum(mask * token_loss) / sum(mask)` over the whole batch, however it is cut into
    microbatches (1 and 0 for the mean over tokens, `1 / n_masked_i` for the mean over sequences).
    """

    tokens: list[NDArray[np.int32]]
    loss_mask: list[NDArray[np.float32]]
    rollout_logprobs: list[NDArray[np.float32]]  # of the engine, under the sampling distribution
    advantages: list[NDArray[np.float32]]
    temperature: float = 1.0  # logits are divided by it, so that log-probs are of the sampling distribution
    # The trainer's own log-probs under the weights before the first step on this data (`Backend.logprobs`).
    # None takes the current ones as constants, which is the same thing for one step per batch.
    old_logprobs: list[NDArray[np.float32]] | None = None
    reference_logprobs: list[NDArray[np.float32]] | None = None  # of the frozen start model
    values: list[NDArray[np.float32]] | None = None  # of the value head, before the first step on this data
    returns: list[NDArray[np.float32]] | None = None  # what the value head learns to predict
    # Recorded experts `[n_i - 1, layers, top_k]`; those of token t go with the log-prob of token t + 1.
    routes: list[NDArray[np.unsignedinteger]] | None = None
    lags: list[NDArray[np.float32]] | None = None  # versions behind of the sampling weights; -1: not known

    def __len__(self) -> int:
        return len(self.tokens)

    def subset(self, indices: Sequence[int]) -> "TrainBatch":
        """The sequences at `indices`, in that order."""
        picked: dict[str, Any] = {}
        for column in fields(self):
            held = getattr(self, column.name)
            picked[column.name] = [held[i] for i in indices] if isinstance(held, list) else held
        return TrainBatch(**picked)
