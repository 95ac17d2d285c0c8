"""Figures of an evaluation: mean reward, pass@k, and how sure they are.

Episodes of one task are not independent, so the intervals count tasks: the standard error is that of the
tasks' means (clusters; Miller 2024, "Adding Error Bars to Evals", arXiv:2411.00640), and it enters Wilson's
interval (1927) as an effective number of trials. That keeps within [0, 1] and stays honest where every
task passes or fails.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titogym.harnesses.evaluation.records import EpisodeRecord

_Z = 1.959964  # 95 %
# What differs between two failures of one cause: numbers, ids, paths, quoted texts.
_PARTICULAR = re.compile(r"'[^']*'|\"[^\"]*\"|(?:/[\w.~-]+)+|\b[0-9a-f]{8,}\b|\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class TaskScore:
    """Graded attempts at one task."""

    task: str
    rewards: tuple[float, ...]
    passed: int


@dataclass(frozen=True, slots=True)
class Cause:
    """Failed episodes that say the same: `example` is one of their sentences, `episodes` their names."""

    outcome: str
    example: str
    episodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scores:
    """What an evaluation came to. `ungraded` episodes are in no score; `reward` is None if all are.

    `pass_at` holds pass@k for k = 1, 2, 4, ... and the fewest graded attempts at a task.
    """

    tasks: tuple[TaskScore, ...]
    episodes: int
    ungraded: int
    reward: Estimate | None
    pass_at: Mapping[int, Estimate]
    outcomes: Mapping[str, int]
    causes: tuple[Cause, ...]
    turns: int
    tokens: int
    prompt_tokens: int
    seconds: float  # of agents at work, added up


def score(records: Sequence[EpisodeRecord], success: float = 1.0) -> Scores:
    """The figures of `records`; an attempt passes with a reward of at least `success`."""
    by_task: dict[str, list[float]] = {}
    for record in records:
        if record.reward is not None:
            by_task.setdefault(record.task, []).append(record.reward)
    tasks = tuple(
        TaskScore(task, tuple(rewards), sum(reward >= success for reward in rewards))
        for task, rewards in by_task.items()
    )
    trials = sum(len(task.rewards) for task in tasks)
    fewest = min((len(task.rewards) for task in tasks), default=0)
    return Scores(
        tasks=tasks,
        episodes=len(records),
        ungraded=len(records) - trials,
        reward=interval([statistics.fmean(task.rewards) for task in tasks], trials) if tasks else None,
        pass_at={
            k: interval([pass_at(k, len(task.rewards), task.passed) for task in tasks], trials // k)
            for k in _steps(fewest)
        },
        outcomes=dict(Counter(record.outcome for record in records).most_common()),
        causes=tuple(_causes(records)),
        turns=sum(record.turns for record in records),
        tokens=sum(record.tokens for record in records),
        prompt_tokens=sum(record.prompt_tokens for record in records),
        seconds=math.fsum(record.seconds.get("agent", 0.0) for record in records),
    )


def _steps(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    return sorted({2**n for n in range(most.bit_length())} | {most}) if most else []


def pass_at(k: int, attempts: int, passed: int) -> float:
    """The chance that one of `k` attempts passes: 1 - C(n - c, k) / C(n, k), unbiased.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, equation 1.
    Raises `ValueError` unless 1 <= k <= attempts.
    """
    if not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} needs at least {k} attempts, and there are {attempts}")
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


def interval(means: Sequence[float], trials: int) -> Estimate:
    """The mean of the tasks' means, which lie in [0, 1], with its interval from `trials` trials in all."""
    count = len(means)
    p = statistics.fmean(means)
    n = float(trials if count == 1 else count)
    if count > 1 and 0 < p < 1:
        error = statistics.variance(means) / count
        n = max(float(count), min(float(trials), p * (1 - p) / error)) if error > 0 else float(trials)
    centre = (p + _Z * _Z / (2 * n)) / (1 + _Z * _Z / n)
    half = _Z / (1 + _Z * _Z / n) * math.sqrt(p * (1 - p) / n + _Z * _Z / (4 * n * n))
    return Estimate(p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)))


def _causes(records: Sequence[EpisodeRecord]) -> list[Cause]:
    groups: dict[tuple[str, str], list[EpisodeRecord]] = {}
    for record in records:
        if record.outcome != "finished":
            sentence = record.error or ""
            groups.setdefault((record.outcome, _PARTICULAR.sub("…", sentence)), []).append(record)
    return [
        Cause(outcome, found[0].error or "", tuple(record.name for record in found))
        for (outcome, _), found in sorted(groups.items(), key=lambda group: -len(group[1]))
    ]
