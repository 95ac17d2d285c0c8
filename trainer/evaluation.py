"""Held-out evaluation: the mean reward on tasks that training never sees.

Three places to do it, all giving a score to the step of the weights that earned it:

- shared: on the engines of the rollout, while no new weights are published
- dedicated: on engines of its own, which load a snapshot of the weights while training goes on
- external: a snapshot is left in the run directory for whoever scores it, and the score may come at any
  time, even after the run
"""

import asyncio
import shutil
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from titogym.envs.task import Task
from titogym.errors import UserError
from titogym.gateway.engines.base import EngineError
from titogym.gateway.engines.control import EngineControl
from titogym.harnesses.episode import MODEL_OUTCOMES, EpisodeResult
from titogym.trainer.config.sections import RunConfig
from titogym.trainer.rollout.worker import Places, RunEpisode, failure_cause


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


# --- where it is done --------------------------------------------------------------------------------

Scored = Callable[[Evaluation, Sequence[EpisodeResult]], None]
Measure = Callable[[int], Awaitable[tuple[Evaluation, list[EpisodeResult]]]]  # version -> its score
Snapshot = Callable[[Path], Awaitable[None]]  # writes the present weights as a Hugging Face directory


class EvalEngines(Protocol):
    """Engines that serve evaluation alone. Both calls block."""

    def load(self, model_dir: Path, version: int) -> None:
        """Install the weights in `model_dir` in every engine as `version`, and `verify` it."""
        ...

    def verify(self, version: int) -> None:
        """Raise `UserError`, naming the engine, unless every engine says that it has `version`."""
        ...


class Evaluator(Protocol):
    """Has weights scored. `run` lasts as long as the training."""

    async def run(self, waiting: Sequence[int]) -> None:
        """Work in the background; first on snapshots `waiting` from before."""
        ...

    async def due(self, version: int) -> None:
        """The present weights, `version`, are to be scored; returns when training may go on."""
        ...

    async def finish(self) -> None:
        """Return when everything that is due has been scored, as far as it lies with this process."""
        ...


def snapshot_path(directory: Path, version: int) -> Path:
    """Where the weights of `version` lie for evaluation."""
    return directory / f"step-{version:06d}"


class SharedEvaluator:
    """On the rollout's engines: training waits, so that the weights stay the same."""

    def __init__(self, measure: Measure, scored: Scored) -> None:
        self._measure = measure
        self._scored = scored

    async def run(self, waiting: Sequence[int]) -> None:
        return

    async def due(self, version: int) -> None:
        self._scored(*await self._measure(version))

    async def finish(self) -> None:
        return


class DedicatedEvaluator:
    """On engines of its own. One version is scored and one may wait; then `due` waits too."""

    def __init__(
        self, measure: Measure, scored: Scored, snapshot: Snapshot, directory: Path, engines: EvalEngines
    ) -> None:
        self._measure = measure
        self._scored = scored
        self._snapshot = snapshot
        self._directory = directory
        self._engines = engines
        self._queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)

    async def run(self, waiting: Sequence[int]) -> None:
        for version in waiting:
            await self._score(version)
        while True:
            await self._score(await self._queue.get())
            self._queue.task_done()

    async def due(self, version: int) -> None:
        await _snapshot(self._snapshot, self._directory, version)
        await self._queue.put(version)

    async def finish(self) -> None:
        await self._queue.join()

    async def _score(self, version: int) -> None:
        path = snapshot_path(self._directory, version)
        await asyncio.to_thread(self._engines.load, path, version)
        evaluation, results = await self._measure(version)
        await asyncio.to_thread(self._engines.verify, version)  # nobody has changed them meanwhile
        self._scored(evaluation, results)
        await asyncio.to_thread(shutil.rmtree, path)


class ExternalEvaluator:
    """Leaves snapshots; `RunDirectory.evaluations` reads the scores that others put beside them."""

    def __init__(self, snapshot: Snapshot, directory: Path) -> None:
        self._snapshot = snapshot
        self._directory = directory

    async def run(self, waiting: Sequence[int]) -> None:
        return

    async def due(self, version: int) -> None:
        await _snapshot(self._snapshot, self._directory, version)

    async def finish(self) -> None:
        return


async def _snapshot(write: Snapshot, directory: Path, version: int) -> None:
    """Readers see the whole snapshot or none. One that is there is of these weights, and may be in use."""
    path = snapshot_path(directory, version)
    if path.is_dir():
        return
    partial = path.with_name(f".partial-{path.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    await write(partial)
    partial.rename(path)


def evaluator(
    config: RunConfig,
    *,
    tasks: Sequence[Task],
    run_episode: RunEpisode,
    engines: EvalEngines | None,
    snapshot: Snapshot,
    directory: Path,
    scored: Scored,
) -> Evaluator:
    """The evaluator that `config.eval` asks for."""
    settings = config.eval

    async def measure(version: int) -> tuple[Evaluation, list[EpisodeResult]]:
        assert settings is not None
        return await evaluate(
            tasks,
            run_episode,
            version=version,
            samples_per_task=settings.samples_per_task,
            episodes_in_flight=config.rollout.episodes_in_flight,
        )

    if settings is not None and settings.place == "external":
        return ExternalEvaluator(snapshot, directory)
    if settings is not None and settings.place == "dedicated":
        if engines is None:
            raise ValueError("dedicated evaluation needs engines")
        return DedicatedEvaluator(measure, scored, snapshot, directory, engines)
    return SharedEvaluator(measure, scored)


class DedicatedEngines:
    """The SGLang servers at `urls`, which can read this machine's files."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = list(urls)

    def load(self, model_dir: Path, version: int) -> None:
        for url in self._urls:
            with _engine(url, f"did not load version {version}") as engine:
                engine.pause("abort")
                engine.update_from_disk(str(model_dir.resolve()), str(version))
                engine.resume()
        self.verify(version)

    def verify(self, version: int) -> None:
        for url in self._urls:
            with _engine(url, "does not answer") as engine:
                found = engine.info().weight_version
            if found != str(version):
                raise UserError(
                    f"The evaluation engine {url} has weight version {found!r} in place of {version}: nobody "
                    "but this run may update the engines of eval.urls."
                )


@contextmanager
def _engine(url: str, what: str) -> Iterator[EngineControl]:
    try:
        with EngineControl(url) as engine:
            yield engine
    except EngineError as error:
        raise UserError(
            f"The evaluation engine {url} {what}: {error}. Mend it, then continue the run with --resume."
        ) from error
