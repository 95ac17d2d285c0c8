"""The record of one step, from counters before it and after it."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from titogym.harnesses.episode import EpisodeResult
from titogym.trainer.config.sections import RunConfig
from titogym.trainer.rollout.buffer import Buffer
from titogym.trainer.rollout.consumption import Consumption
from titogym.trainer.rollout.worker import RolloutWorker
from titogym.trainer.runs.metrics import Snapshot, bottleneck, histogram, rollout_figures

_SLOWEST = 5  # episodes of a step that are told apart


class StepRecorder:
    """Follows the step that `begin` has begun, and what comes between `end` and the next one's beginning."""

    def __init__(
        self, config: RunConfig, worker: RolloutWorker, buffer: Buffer, consumption: Consumption
    ) -> None:
        self._config = config
        self._worker = worker
        self._buffer = buffer
        self._consumption = consumption
        self.end()
        self.begin()

    def begin(self) -> None:
        self._started = time.monotonic()
        self._began = Snapshot.take(self._worker, self._buffer)

    def end(self) -> None:
        """The step's record is written: what is counted from now on is the next one's."""
        self._before = Snapshot.take(self._worker, self._buffer)
        self._failures = Counter(self._worker.counters.failures)
        self._slowest: list[dict[str, Any]] = []
        self._mismatches: dict[str, Counter[str]] = {}  # type -> cause -> episodes

    def episode_ended(self, result: EpisodeResult, seconds: float) -> None:
        known = {"task": result.task_id, "seconds": round(seconds, 2), "turns": result.turns}
        for kind, cause in {(finding["type"], finding["cause"]) for finding in result.findings}:
            self._mismatches.setdefault(kind, Counter())[cause] += 1
        self._slowest = sorted([*self._slowest, known], key=lambda e: -e["seconds"])[:_SLOWEST]

    def record(self, step: int, figures: Mapping[str, float]) -> dict[str, Any]:
        """The step's line of metrics.jsonl as of now; `figures` are those of its batch and its update.

        Seconds under `time/checkpoint` are no part of the step.
        """
        known = dict(figures)
        elapsed = time.monotonic() - self._started - known.pop("time/checkpoint", 0.0)
        now = Snapshot.take(self._worker, self._buffer)
        known |= rollout_figures(self._before, self._began, now, elapsed)
        known |= {
            "rollout/in_flight": self._worker.in_flight,
            "time/step": elapsed,
            "consumption/starved_tasks": len(self._consumption.starved),
        }
        if (bias := self._consumption.duration_bias()) is not None:
            known["consumption/duration_bias"] = bias
        known, bins = histogram(known)
        return {
            "step": step,
            "time": time.time(),
            **bottleneck(known, self._config.rollout.groups_per_step, self._config.buffer.capacity),
            "failures": dict(self._worker.counters.failures - self._failures),
            "mismatches": {kind: dict(causes) for kind, causes in self._mismatches.items()},
            "histogram": bins,
            "consumption": self._consumption.table(),
            "slowest": self._slowest,
            **known,
        }
