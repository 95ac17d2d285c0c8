"""The rollout worker: keeps a fixed number of episodes in flight and fills the buffer with groups."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from titogym.envs.task import Task
from titogym.errors import UserError
from titogym.harnesses.episode import MODEL_OUTCOMES, EpisodeResult
from titogym.trainer.batch import Group, Sample
from titogym.trainer.buffer import GroupBuffer
from titogym.trainer.ledger import Assignment, TaskLedger

# Runs one episode under labels that name it. What goes wrong inside is in its result, never raised.
RunEpisode = Callable[[Task, Mapping[str, str]], Awaitable[EpisodeResult]]


@dataclass(slots=True)
class RolloutCounters:
    """What the worker has done since it was made."""

    episodes: int = 0  # ended, failed ones included
    turns: int = 0
    sampled_tokens: int = 0
    mismatches: int = 0  # episodes whose session reports a tito_session_mismatch
    seconds: float = 0.0  # summed over episodes
    groups: int = 0  # given to the buffer
    discarded: int = 0  # groups with fewer than two usable episodes
    failures: Counter[str] = field(default_factory=Counter)  # by cause


class Places:
    """The episodes that may be in flight. One taker at a time; places come back one by one."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._changed = asyncio.Event()

    async def take(self, count: int) -> None:
        """Wait until `count` places are free together, and take them."""
        while self._free < count:
            self._changed.clear()
            await self._changed.wait()
        self._free -= count

    def give_back(self) -> None:
        self._free += 1
        self._changed.set()


class RolloutWorker:
    """Runs the assignments of a ledger and puts every finished group into the buffer.

    `episodes_in_flight` places are refilled sample by sample: each ended episode gives its place back at
    once, and as soon as `samples_per_prompt` places are free, and the buffer has room, the next group
    starts, whatever the groups before it are waiting for.

    A failed episode counts in its group's `failures`. A group with fewer than two usable episodes has
    nothing to compare: it is discarded and settled with the ledger.
    """

    def __init__(
        self,
        *,
        ledger: TaskLedger,
        buffer: GroupBuffer,
        run_episode: RunEpisode,
        samples_per_prompt: int,
        episodes_in_flight: int,
        max_failures_in_a_row: int,
        on_failure: Callable[[EpisodeResult], None] = lambda result: None,
    ) -> None:
        self.counters = RolloutCounters()
        self.in_flight = 0
        self._ledger = ledger
        self._buffer = buffer
        self._run_episode = run_episode
        self._samples_per_prompt = samples_per_prompt
        self._max_failures_in_a_row = max_failures_in_a_row
        self._on_failure = on_failure
        self._places = Places(episodes_in_flight)
        self._failing: Counter[str] = Counter()  # causes of the failures since the last usable episode

    async def run(self) -> None:
        """Collect until cancelled; then every episode is cancelled and has cleaned up before this returns.

        Raises `UserError` when `max_failures_in_a_row` episodes in a row have failed.
        """
        try:
            async with asyncio.TaskGroup() as groups:
                while True:
                    await self._places.take(self._samples_per_prompt)
                    await self._buffer.room()
                    groups.create_task(self._collect(self._ledger.next()))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    async def _collect(self, assignment: Assignment) -> None:
        async with asyncio.TaskGroup() as members:
            episodes = [
                members.create_task(self._episode(assignment, member))
                for member in range(self._samples_per_prompt)
            ]
        group = Group(assignment.task.id, [], assignment.index, assignment.attempt)
        for number, episode in enumerate(task.result() for task in episodes):
            samples = samples_of(episode, number)
            group.samples += samples
            if not samples:
                group.failures.append(failure_cause(episode))
        if len(episodes) - len(group.failures) < 2:
            self.counters.discarded += 1
            self._ledger.settle(assignment.index)
            return
        await self._buffer.put(group)
        self.counters.groups += 1

    async def _episode(self, assignment: Assignment, member: int) -> EpisodeResult:
        labels = {"group": str(assignment.index), "attempt": str(assignment.attempt), "member": str(member)}
        self.in_flight += 1
        try:
            result = await self._run_episode(assignment.task, labels)
        finally:
            self.in_flight -= 1
            self._places.give_back()
        self._count(result)
        return result

    def _count(self, result: EpisodeResult) -> None:
        counters = self.counters
        counters.episodes += 1
        counters.turns += result.turns
        counters.sampled_tokens += sum(sum(trajectory.loss_mask) for trajectory in result.trajectories)
        counters.mismatches += bool(result.mismatches)
        counters.seconds += result.seconds.get("total", 0.0)
        if samples_of(result, 0):
            self._failing.clear()
            return
        cause = failure_cause(result)
        counters.failures[cause] += 1
        self._failing[cause] += 1
        self._on_failure(result)
        if self._failing.total() >= self._max_failures_in_a_row:
            causes = ", ".join(f"{times} x {name}" for name, times in self._failing.most_common())
            raise UserError(
                f"{self._failing.total()} episodes in a row failed ({causes}); the last one said: "
                f"{result.error or 'nothing'} Mend that or raise rollout.max_failures_in_a_row, then "
                "continue the run with --resume."
            )


def failure_cause(result: EpisodeResult) -> str:
    """Why an episode without samples cannot be trained on, as a short name to count by."""
    if result.outcome in MODEL_OUTCOMES:  # it ended well, but without what training needs
        return "no_reward" if result.reward is None else "no_tokens"
    return result.outcome


def samples_of(episode: EpisodeResult, number: int) -> list[Sample]:
    """One sample per trajectory that carries loss, all with the episode's reward and `number` in its group.

    Empty when the episode cannot be trained on.
    """
    if not episode.usable or episode.reward is None:
        return []
    return [
        Sample(
            tokens=trajectory.tokens,
            loss_mask=trajectory.loss_mask,
            logprobs=trajectory.logprobs,
            version_spans=trajectory.version_spans,
            reward=episode.reward,
            episode=number,
            metadata={
                "session": trajectory.session_id,
                "leaf": trajectory.leaf,
                "turns": trajectory.turns,
                "outcome": episode.outcome,
                "finish_reason": trajectory.finish_reason,
            },
        )
        for trajectory in episode.trajectories
        if any(trajectory.loss_mask)
    ]


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that made its task group give up; the others are what it cancelled."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
