"""Held-out evaluation: the mean reward on tasks that training never sees."""

import asyncio
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titogym.envs.task import Task
from titogym.harnesses.episode import MODEL_OUTCOMES, EpisodeResult
from titogym.trainer.rollout import Places, RunEpisode, failure_cause


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of one set of weights.

    `score` is the mean over tasks of the mean reward of their graded episodes, None when none was graded.
    An episode that has no reward, or that ended by other than its model's doing, is counted in `failures`
    by cause and never becomes a number. `versions` are the weight versions that the episodes' tokens
    carry: more than one, or another than `version`, means that the score is not of those weights alone.
    """

    version: int
    score: float | None
    tasks: int
    graded: int
    episodes: int
    by_task: dict[str, float]
    failures: dict[str, int]
    versions: list[str]

    def as_record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


async def evaluate(
    tasks: Sequence[Task],
    run_episode: RunEpisode,
    *,
    version: int,
    samples_per_task: int,
    episodes_in_flight: int,
) -> tuple[Evaluation, list[EpisodeResult]]:
    """Run every task `samples_per_task` times, at most `episodes_in_flight` episodes at a time.

    The results come in the order of the tasks.
    """
    places = Places(episodes_in_flight)

    async def attempt(task: Task, member: int) -> EpisodeResult:
        try:
            return await run_episode(task, {"evaluation": str(version), "member": str(member)})
        finally:
            places.give_back()

    async with asyncio.TaskGroup() as episodes:
        running = []
        for task in tasks:
            for member in range(samples_per_task):
                await places.take(1)
                running.append(episodes.create_task(attempt(task, member)))
    results = [done.result() for done in running]
    return summarise(results, version), results


def summarise(results: Sequence[EpisodeResult], version: int) -> Evaluation:
    """The evaluation that `results` amount to."""
    rewards: dict[str, list[float]] = {}
    failures: Counter[str] = Counter()
    for result in results:
        if result.reward is None or result.outcome not in MODEL_OUTCOMES:
            failures[failure_cause(result)] += 1
        else:
            rewards.setdefault(result.task_id, []).append(result.reward)
    by_task = {task: statistics.fmean(values) for task, values in rewards.items()}
    versions = {name for r in results for t in r.trajectories for _, _, name in t.version_spans}
    return Evaluation(
        version=version,
        score=statistics.fmean(by_task.values()) if by_task else None,
        tasks=len(by_task),
        graded=sum(len(values) for values in rewards.values()),
        episodes=len(results),
        by_task=by_task,
        failures=dict(failures),
        versions=sorted(versions),
    )
