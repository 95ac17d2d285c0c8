"""The fully asynchronous driver: rollout and training overlap, and meet only in the buffer.

Version `k` is the weights after `k` optimizer steps. Before the first step the trainer's own weights go
to the engines (version 0, or the checkpoint's step), so that no token is ever sampled from weights that
the trainer does not know. After every step the new weights are published, and only then does the
buffer's version advance.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from titogym.envs.task import Task
from titogym.harnesses.episode import EpisodeResult
from titogym.trainer.batch import Group, TrainBatch
from titogym.trainer.buffer import GroupBuffer, Reason
from titogym.trainer.collate import minibatches, train_batch
from titogym.trainer.config import RunConfig
from titogym.trainer.evaluation import evaluate
from titogym.trainer.ledger import TaskLedger, TaskOrder
from titogym.trainer.metrics import Snapshot, batch_figures, bottleneck, over_updates, rollout_figures
from titogym.trainer.progress import Progress, Status
from titogym.trainer.records import episode_records, sample_records, spread
from titogym.trainer.rollout import RolloutWorker, RunEpisode, failure_cause, first_error
from titogym.trainer.runs import RunDirectory

T = TypeVar("T")
_HEALTH_INTERVAL = 1.0  # seconds between looks at the child processes


class Trainer(Protocol):
    """The process that holds the weights in training. Every call blocks; one call at a time."""

    def logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]: ...

    def train_step(self, batch: TrainBatch) -> dict[str, float]: ...

    def publish_weights(self, version: int) -> dict[str, float]:
        """Install the current weights in every engine as `version`."""
        ...

    def save(self, path: Path) -> None: ...

    def save_hf(self, model_dir: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run works with, ready for use.

    `run_episode` samples as training does, `run_eval_episode` as evaluation does. `token_text` shows one
    token id. `check_health` raises `UserError` when a process that the run depends on has died.
    """

    trainer: Trainer
    run_episode: RunEpisode
    run_eval_episode: RunEpisode
    tasks: Sequence[Task]
    eval_tasks: Sequence[Task]
    token_text: Callable[[int], str]
    check_health: Callable[[], None] = lambda: None


async def train(config: RunConfig, parts: Parts, run: RunDirectory, progress: Progress) -> None:
    """Train from the last checkpoint of `run`, or from the start, to `config.run.steps`.

    The caller has loaded that checkpoint into `parts.trainer`. Returns with the last checkpoint and the
    model written. Raises `UserError` when the run cannot go on. On every way out, cancellation included,
    all episodes have been cancelled and cleaned up.
    """
    await _Run(config, parts, run, progress).to_the_end()


class _Run:
    def __init__(self, config: RunConfig, parts: Parts, run: RunDirectory, progress: Progress) -> None:
        self._config = config
        self._parts = parts
        self._run = run
        self._progress = progress
        self._step = max(run.checkpoints(), default=0)
        state = run.load_state(self._step)["ledger"] if self._step else None
        self._ledger = TaskLedger(TaskOrder(parts.tasks, config.run.seed), state)
        self._buffer = GroupBuffer(
            capacity=config.buffer.capacity,
            max_staleness=config.buffer.max_staleness,
            max_retries=config.buffer.max_retries if config.buffer.on_stale == "retry" else 0,
            on_retry=self._ledger.retry,
            on_drop=self._dropped,
            version=self._step,
        )
        self._worker = RolloutWorker(
            ledger=self._ledger,
            buffer=self._buffer,
            run_episode=parts.run_episode,
            samples_per_prompt=config.rollout.samples_per_prompt,
            episodes_in_flight=config.rollout.episodes_in_flight,
            max_failures_in_a_row=config.rollout.max_failures_in_a_row,
            on_failure=self._failed,
        )
        self._phase = "starting"
        # Of its own: sandboxes keep the event loop's threads busy.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer-calls")

    async def to_the_end(self) -> None:
        self._progress.watch(self._status)
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch_health())
                await self._publish(self._step)
                if self._step == 0:
                    await self._evaluate()
                collecting = group.create_task(self._worker.run())
                while self._step < self._config.run.steps:
                    await self._train_one_step()
                collecting.cancel()
                await asyncio.wait([collecting])
                await self._finish()
                watching.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            self._thread.shutdown(wait=False)

    async def _train_one_step(self) -> None:
        config, trainer = self._config, self._parts.trainer
        started, before = time.monotonic(), Snapshot.take(self._worker, self._buffer)
        failures = Counter(self._worker.counters.failures)
        self._phase = "waiting for groups"
        groups = await self._buffer.take(config.rollout.groups_per_step)
        figures = batch_figures(groups, self._step) | {"buffer/size": len(self._buffer)}
        batch = train_batch(groups, config.algorithm, config.rollout.temperature)
        self._phase = "scoring"
        with _timed(figures, "time/logprobs"):
            await self._score(groups, batch)
        self._phase = "training"
        with _timed(figures, "time/train"):
            updates = [
                await self._blocking(trainer.train_step, batch.subset(part))
                for part in minibatches(groups, config.algorithm.minibatches)
            ]
        figures |= over_updates(updates)
        self._step += 1
        with _timed(figures, "time/publish"):
            figures |= await self._publish(self._step)
        for group in groups:
            self._ledger.settle(group.index)
        elapsed = time.monotonic() - started
        figures |= rollout_figures(before, Snapshot.take(self._worker, self._buffer), elapsed)
        figures |= {
            "rollout/in_flight": self._worker.in_flight,
            "time/step": elapsed,
        }
        self._record(figures, self._worker.counters.failures - failures)
        if self._step < config.run.steps:
            if config.eval and config.eval.every and self._step % config.eval.every == 0:
                await self._evaluate()
            if self._step % config.checkpoint.every == 0:
                await self._checkpoint()

    def _record(self, figures: dict[str, float], failures: Counter[str]) -> None:
        record = {
            "step": self._step,
            "time": time.time(),
            "bottleneck": bottleneck(
                figures["time/wait"], figures["time/rollout_blocked"], figures["time/step"]
            ),
            "failures": dict(failures),
            **figures,
        }
        self._run.add_metrics(record)
        self._progress.step(record)

    async def _finish(self) -> None:
        await self._evaluate()
        await self._checkpoint()
        self._phase = "saving the model"
        await self._blocking(self._parts.trainer.save_hf, self._run.model)

    async def _publish(self, version: int) -> dict[str, float]:
        self._phase = "publishing weights"
        figures = await self._blocking(self._parts.trainer.publish_weights, version)
        self._buffer.advance(version)
        return figures

    async def _evaluate(self) -> None:
        settings = self._config.eval
        if settings is None or any(done["version"] == self._step for done in self._run.evaluations()):
            return
        self._phase = "evaluating"
        evaluation, results = await evaluate(
            self._parts.eval_tasks,
            self._parts.run_eval_episode,
            version=self._step,
            samples_per_task=settings.samples_per_task,
            episodes_in_flight=self._config.rollout.episodes_in_flight,
        )
        self._run.add_evaluation(asdict(evaluation))
        kept = results[: self._config.run.keep_trajectories]
        records = episode_records(kept, self._parts.token_text)
        self._run.keep_trajectories(f"eval-{self._step:06d}", records)
        self._progress.evaluation(evaluation)

    async def _checkpoint(self) -> None:
        self._phase = "writing a checkpoint"
        # The ledger is read before the trainer is saved: what the worker collects meanwhile is still owed.
        await self._blocking(
            self._run.save_checkpoint,
            self._step,
            {"ledger": self._ledger.state()},
            self._parts.trainer.save,
            self._config.checkpoint.keep,
        )

    async def _score(self, groups: Sequence[Group], batch: TrainBatch) -> None:
        """Keep some trajectories, with the log-probs of engine and trainer side by side.

        When there are several updates, the log-probs of the whole batch are the `old` ones of all of them;
        a single update has its own, and only the kept trajectories need scoring.
        """
        kept = spread(groups, self._config.run.keep_trajectories)
        scored: dict[int, NDArray[np.float32]] = {}
        if self._config.algorithm.minibatches > 1:
            batch.old_logprobs = await self._blocking(self._parts.trainer.logprobs, batch)
            scored = {place: batch.old_logprobs[place] for place in kept}
        elif kept:
            logprobs = await self._blocking(self._parts.trainer.logprobs, batch.subset(kept))
            scored = dict(zip(kept, logprobs, strict=True))
        records = sample_records(groups, batch, scored, self._parts.token_text)
        self._run.keep_trajectories(f"step-{self._step + 1:06d}", records)

    def _dropped(self, group: Group, reason: Reason) -> None:
        self._ledger.settle(group.index)
        self._run.add_event(
            "group_dropped", self._step, reason=reason, task=group.task_id, attempts=group.attempt + 1
        )

    def _failed(self, result: EpisodeResult) -> None:
        self._run.add_event(
            "episode_failed",
            self._step,
            cause=failure_cause(result),
            task=result.task_id,
            error=result.error,
            log=result.log[-2000:],
        )

    async def _watch_health(self) -> None:
        while True:
            self._parts.check_health()
            await asyncio.sleep(_HEALTH_INTERVAL)

    def _status(self) -> Status:
        return Status(
            step=self._step,
            steps=self._config.run.steps,
            phase=self._phase,
            in_flight=self._worker.in_flight,
            places=self._config.rollout.episodes_in_flight,
            queue=len(self._buffer),
            capacity=self._buffer.capacity,
            episodes=self._worker.counters.episodes,
            failed=self._worker.counters.failures.total(),
            sampled_tokens=self._worker.counters.sampled_tokens,
        )

    async def _blocking(self, call: Callable[..., T], *arguments: Any) -> T:
        """Await a call that blocks. When this is cancelled, the call goes on until the trainer is closed."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)


@contextmanager
def _timed(figures: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    figures[name] = time.monotonic() - started
