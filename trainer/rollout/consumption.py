"""Which tasks training lives on, by how long they take.

Where stale groups are rejected, tasks that take long are rejected more often than others, and one that
always takes longer than `max_staleness` steps is never trained on: the data lean to short tasks. This
counts what became of every group by the seconds that it took, so that the lean shows.
"""

import bisect
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from titogym.trainer.batch import Group

Fate = Literal["trained", "stale", "failures", "filtered"]
_EDGES = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)  # seconds
BUCKETS = ("under 1 s", "1-4 s", "4-16 s", "16-64 s", "64-256 s", "256-1024 s", "over 1024 s")
STARVED_AFTER = 3  # times that a task is rejected as stale, never having been trained on, until it is told


class Consumption:
    """Counts fates of groups. A group's `metadata["seconds"]` is the duration of its longest episode."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        held = state or {"fates": {}, "seconds": {}, "stale": {}, "trained": []}
        self._fates = {bucket: Counter(fates) for bucket, fates in held["fates"].items()}
        self._seconds: Counter[str] = Counter(held["seconds"])  # summed, by fate
        self._stale_since: Counter[str] = Counter(held["stale"])  # task -> stale groups, until it is trained
        self._trained: set[str] = set(held["trained"])

    def settle(self, group: Group, fate: Fate) -> bool:
        """`group` has come to its end. True when its task has now starved (once per task)."""
        seconds = float(group.metadata.get("seconds", 0.0))
        bucket = BUCKETS[bisect.bisect_right(_EDGES, seconds)]
        self._fates.setdefault(bucket, Counter())[fate] += 1
        self._seconds[fate] += seconds  # type: ignore[assignment]
        if fate == "trained":
            self._trained.add(group.task_id)
        elif fate == "stale" and group.task_id not in self._trained:
            self._stale_since[group.task_id] += 1
            return self._stale_since[group.task_id] == STARVED_AFTER
        return False

    @property
    def starved(self) -> list[str]:
        """Tasks that were rejected as stale `STARVED_AFTER` times or more and never trained on."""
        return sorted(
            task
            for task, times in self._stale_since.items()
            if times >= STARVED_AFTER and task not in self._trained
        )

    def duration_bias(self) -> float | None:
        """Mean seconds of the groups trained on over those of all that were trained on or stale.

        1 means that long and short tasks are consumed alike; below 1, that training leans to short ones.
        None before the first is trained on, or when nothing took any time.
        """
        trained, stale = self._count("trained"), self._count("stale")
        seconds = self._seconds["trained"] + self._seconds["stale"]
        if not trained or not seconds:
            return None
        return (self._seconds["trained"] / trained) / (seconds / (trained + stale))

    def table(self) -> dict[str, dict[str, int]]:
        """Groups by duration and fate, shortest first."""
        return {bucket: dict(self._fates[bucket]) for bucket in BUCKETS if bucket in self._fates}

    def state(self) -> dict[str, Any]:
        """What the constructor takes; JSON."""
        return {
            "fates": self.table(),
            "seconds": dict(self._seconds),
            "stale": dict(self._stale_since),
            "trained": sorted(self._trained),
        }

    def _count(self, fate: Fate) -> int:
        return sum(fates[fate] for fates in self._fates.values())
