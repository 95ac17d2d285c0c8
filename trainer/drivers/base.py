"""What both drivers share: the parts of a run, one optimizer step, and everything that is written about it.

Version `k` is the weights after `k` optimizer steps. Before the first step the trainer's own weights go
to the engines (version 0, or the checkpoint's step), so that no token is ever sampled from weights that
the trainer does not know. After every step the new weights are published, and only then does the
buffer's version advance.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from titogym import dotted
from titogym.errors import UserError
from titogym.harnesses.episode import EpisodeResult
from titogym.trainer.batch import Group, TrainBatch
from titogym.trainer.config.sections import RunConfig
from titogym.trainer.drivers.parts import Parts
from titogym.trainer.drivers.steps import StepRecorder
from titogym.trainer.evaluation import Evaluation, Evaluator, evaluator
from titogym.trainer.learning.collate import add_advantages, minibatches, train_batch
from titogym.trainer.rollout.buffer import Buffer, BufferSettings, Reason
from titogym.trainer.rollout.consumption import Consumption
from titogym.trainer.rollout.ledger import TaskLedger, TaskOrder
from titogym.trainer.rollout.worker import (
    RolloutSettings,
    RolloutWorker,
    failure_cause,
    first_error,
    samples_of,
)
from titogym.trainer.runs.directory import RunDirectory
from titogym.trainer.runs.metrics import batch_figures, over_updates
from titogym.trainer.runs.progress import Progress, Status
from titogym.trainer.runs.records import episode_records, sample_records, spread
from titogym.trainer.runs.storage import write_groups

T = TypeVar("T")
_HEALTH_INTERVAL = 1.0  # seconds between looks at the child processes
_UPDATES = 5  # attempts of one update, while engines die under it
_LOOKS = 3  # for a process whose death made an update fail


class Driver(ABC):
    """One run, from the last checkpoint of its directory, or from the start, to `config.run.steps`.

    The caller has loaded that checkpoint into `parts.trainer`.
    """

    def __init__(self, config: RunConfig, parts: Parts, run: RunDirectory, progress: Progress) -> None:
        self._config = config
        self._parts = parts
        self._run = run
        self._progress = progress
        self._step = self._published = run.last_step()
        state = run.load_state(self._step) if self._step else {"ledger": None, "consumption": None}
        held = run.load_groups(self._step) if self._step else []
        self._ledger = TaskLedger(
            TaskOrder(parts.tasks, config.run.seed), state["ledger"], {group.index for group in held}
        )
        self._consumption = Consumption(state.get("consumption"))
        make_buffer: Callable[..., Buffer] = dotted.load(
            config.buffer.implementation, "buffer.implementation"
        )
        self._buffer = make_buffer(
            BufferSettings.of(config), on_retry=self._retry, on_drop=self._dropped, version=self._step
        )
        self._buffer.restore(held)
        self._worker = RolloutWorker(
            RolloutSettings.of(config.rollout),
            ledger=self._ledger,
            buffer=self._buffer,
            run_episode=parts.run_episode,
            admit=self._admission(),
            on_episode=self._episode_ended,
            version=lambda: self._published,
            announce=parts.announce,
        )
        self._evaluator: Evaluator = evaluator(
            config,
            tasks=parts.eval_tasks,
            run_episode=parts.run_eval_episode,
            engines=parts.eval_engines,
            snapshot=self._snapshot,
            directory=run.evaluation_snapshots,
            scored=self._scored,
        )
        self._phase = "starting"
        self._weights = asyncio.Lock()  # held from an update to its publication
        self._recorder = StepRecorder(config, self._worker, self._buffer, self._consumption)
        if (unwritten := state.get("record")) and self._step > len(run.metrics()):
            run.add_metrics(unwritten)  # a kill came between the checkpoint and the step's end
        # Of its own: sandboxes keep the event loop's threads busy.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer-calls")

    async def to_the_end(self) -> None:
        """Returns with the last checkpoint and the model written.

        Raises `UserError` when the run cannot go on. On every way out, cancellation included, all episodes
        have been cancelled and cleaned up.
        """
        self._progress.watch(self._status)
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch_health())
                scoring = group.create_task(self._evaluator.run(self._waiting_for_scores()))
                async with self._weights:
                    await self._publish(self._step)
                if self._step == 0 or self._evaluation_is_due():  # a kill may have come before it
                    await self._evaluate()
                collecting = group.create_task(self._worker.run())
                while self._step < self._config.run.steps:
                    await self._one_step()
                collecting.cancel()
                await asyncio.wait([collecting])
                await self._evaluate()
                if self._step not in self._run.checkpoints():
                    await self._checkpoint()
                self._phase = "waiting for evaluations"
                await self._evaluator.finish()
                self._phase = "saving the model"
                await self._blocking(self._parts.trainer.save_hf, self._run.model)
                watching.cancel()
                scoring.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            self._run.clear_status()
            self._thread.shutdown(wait=False)

    # --- what drivers differ in ----------------------------------------------------------------------

    @abstractmethod
    def _admission(self) -> Callable[[], Awaitable[None]] | None:
        """What a group waits for before it starts; None: room in the buffer."""

    @abstractmethod
    async def _collect(self) -> list[Group]:
        """The groups of the next step."""

    @abstractmethod
    async def _after_update(self, figures: dict[str, float]) -> dict[str, float]:
        """Publish the weights of the step that was just taken, and do what else is due.

        `figures` are the step's so far; returns those that are added.
        """

    @abstractmethod
    async def _between_steps(self) -> None:
        """What is due once the step's record is written."""

    # --- one step ------------------------------------------------------------------------------------

    async def _one_step(self) -> None:
        self._recorder.begin()
        self._phase = "waiting for groups"
        groups = await self._collect()
        figures = batch_figures(groups, self._step) | {"buffer/size": len(self._buffer)}
        async with self._weights:
            figures |= await self._update(groups)
            self._step += 1
            for group in groups:
                self._ledger.settle(group.index)
                self._consumption.settle(group, "trained")
            figures |= await self._after_update(figures)
        self._record(self._recorder.record(self._step, figures))
        self._recorder.end()
        await self._between_steps()

    async def _update(self, groups: Sequence[Group]) -> dict[str, float]:
        """One step's optimizer updates on `groups`."""
        config, trainer = self._config, self._parts.trainer
        algorithm = config.algorithm
        figures: dict[str, float] = {}
        batch = train_batch(groups, algorithm, config.rollout.temperature, self._step)
        self._phase = "scoring"
        with timed(figures, "time/logprobs"):
            # Where there are several updates, all take their ratio to the weights before the first.
            if algorithm.minibatches > 1 or algorithm.kl == "reward":
                batch.old_logprobs = await self._blocking(trainer.logprobs, batch)
            if algorithm.needs_reference:
                batch.reference_logprobs = await self._blocking(trainer.reference_logprobs, batch)
            if algorithm.needs_value:
                batch.values = await self._blocking(trainer.values, batch)
            add_advantages(batch, groups, algorithm)
            await self._keep(groups, batch)
        self._phase = "training"
        with timed(figures, "time/train"):
            updates = [
                await self._blocking(trainer.train_step, batch.subset(part))
                for part in minibatches(groups, algorithm.minibatches)
            ]
        return figures | over_updates(updates)

    async def _keep(self, groups: Sequence[Group], batch: TrainBatch) -> None:
        """Keep some trajectories, with the log-probs of engine and trainer side by side."""
        kept = spread(groups, self._config.run.keep_trajectories)
        scored: dict[int, NDArray[np.float32]] = {}
        if batch.old_logprobs is not None:
            scored = {place: batch.old_logprobs[place] for place in kept}
        elif kept:
            logprobs = await self._blocking(self._parts.trainer.logprobs, batch.subset(kept))
            scored = dict(zip(kept, logprobs, strict=True))
        records = sample_records(groups, batch, scored, self._parts.token_text)
        self._run.keep_trajectories(f"step-{self._step + 1:06d}", records)
        if self._config.run.keep_batches:
            path = self._run.batch_path(self._step + 1)
            await asyncio.to_thread(write_groups, path, groups, {"advantages": batch.advantages})

    def _record(self, record: dict[str, Any]) -> None:
        self._run.add_metrics(record)
        for tracker in self._parts.trackers:
            tracker.step(record)
        self._progress.step(record)

    async def _publish(self, version: int) -> dict[str, float]:
        self._phase = "publishing weights"
        for attempt in range(1, _UPDATES + 1):
            try:
                figures = await self._blocking(self._parts.trainer.publish_weights, version)
                break
            except UserError:
                if attempt == _UPDATES or not await self._mended():
                    raise
        await self._parts.let_in()
        self._buffer.advance(version)
        self._published = version
        return figures

    async def _mended(self) -> bool:
        """Whether an engine was replaced, whose death may take a moment to show."""
        for _ in range(_LOOKS):
            self._parts.check_health()
            if await self._parts.mend():
                return True
            await asyncio.sleep(_HEALTH_INTERVAL)
        return False

    # --- evaluation ----------------------------------------------------------------------------------

    async def _evaluate(self) -> None:
        """Have the present weights scored, unless they are."""
        if self._config.eval is None or self._step in self._run.scored():
            return
        self._phase = "evaluating"
        await self._evaluator.due(self._step)

    def _evaluation_is_due(self) -> bool:
        settings = self._config.eval
        return bool(
            settings
            and settings.every
            and self._step % settings.every == 0
            and self._step < self._config.run.steps
        )

    def _waiting_for_scores(self) -> list[int]:
        """Versions whose snapshot an earlier process took and did not score; not what is due again anyway."""
        again = self._step in (0, self._config.run.steps) or self._evaluation_is_due()
        done = self._run.scored() | ({self._step} if again else set())
        return [v for v in self._run.evaluation_snapshots_taken() if v not in done and v <= self._step]

    async def _snapshot(self, path: Path) -> None:
        await self._blocking(self._parts.trainer.save_hf, path)

    def _scored(self, evaluation: Evaluation, results: Sequence[EpisodeResult]) -> None:
        self._run.add_evaluation({**evaluation.as_record(), "at_step": self._step})
        if evaluation.versions not in ([], [str(evaluation.version)]):
            self._run.add_event(
                "evaluation_of_mixed_weights",
                self._step,
                version=evaluation.version,
                versions=evaluation.versions,
            )
        kept = results[: self._config.run.keep_trajectories]
        records = episode_records(kept, self._parts.token_text)
        self._run.keep_trajectories(f"eval-{evaluation.version:06d}", records)
        for tracker in self._parts.trackers:
            tracker.evaluation(evaluation)
        self._progress.evaluation(evaluation)

    # --- checkpoints and events ----------------------------------------------------------------------

    async def _checkpoint(self, record: Mapping[str, Any] | None = None) -> None:
        """`record` is that of the step, where it is not written yet."""
        self._phase = "writing a checkpoint"
        # Ledger and buffer are read before the trainer is saved: what the worker collects meanwhile is owed.
        await self._blocking(
            self._run.save_checkpoint,
            self._step,
            {"ledger": self._ledger.state(), "consumption": self._consumption.state(), "record": record},
            self._parts.trainer.save,
            self._config.checkpoint.keep,
            self._buffer.waiting(),
        )

    def _checkpoint_is_due(self) -> bool:
        return self._step % self._config.checkpoint.every == 0 and self._step < self._config.run.steps

    def _retry(self, group: Group, reason: Reason) -> None:
        self._ledger.retry(group)
        self._refused(group, reason)

    def _dropped(self, group: Group, reason: Reason) -> None:
        self._ledger.settle(group.index)
        self._run.add_event(
            "group_dropped",
            self._step,
            reason=reason,
            group=group.index,
            task=group.task_id,
            attempts=group.attempt + 1,
            seconds=group.metadata.get("seconds"),
            why=group.metadata.get("filtered", ", ".join(group.failures)),
        )
        self._refused(group, reason)

    def _refused(self, group: Group, reason: Reason) -> None:
        """Hears of every group that the buffer rejects."""
        if self._consumption.settle(group, reason):
            self._run.add_event(
                "task_starved", self._step, task=group.task_id, seconds=group.metadata.get("seconds")
            )

    def _episode_ended(self, result: EpisodeResult, seconds: float) -> None:
        self._recorder.episode_ended(result, seconds)
        if not samples_of(result, 0):
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
            self._run.write_status(asdict(self._status()))
            self._parts.check_health()
            if await self._parts.mend():
                async with self._weights:  # not between an update and its publication
                    if await self._parts.mend():  # unless that publication has served the new engine too
                        await self._publish(self._step)
            await asyncio.sleep(_HEALTH_INTERVAL)

    def _status(self) -> Status:
        counters = self._worker.counters
        return Status(
            step=self._step,
            steps=self._config.run.steps,
            phase=self._phase,
            in_flight=self._worker.in_flight,
            places=self._config.rollout.episodes_in_flight,
            queue=len(self._buffer),
            capacity=self._config.buffer.capacity,
            episodes=counters.episodes,
            failed=counters.failures.total(),
            sampled_tokens=counters.sampled_tokens,
        )

    async def _blocking(self, call: Callable[..., T], *arguments: Any) -> T:
        """Await a call that blocks. When this is cancelled, the call goes on until the trainer is closed."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)


@contextmanager
def timed(figures: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    figures[name] = time.monotonic() - started
