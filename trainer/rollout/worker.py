"""The rollout worker: keeps a fixed number of episodes in flight and fills the buffer with groups."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from titogym.envs.task import Task
from titogym.errors import UserError
from titogym.gateway.trajectories import Trajectory
from titogym.harnesses.episode import MODEL_OUTCOMES, EpisodeResult
from titogym.harnesses.findings import Finding
from titogym.trainer.batch import Group, Sample, route_array
from titogym.trainer.config.sections import RolloutSection
from titogym.trainer.rollout.buffer import Buffer
from titogym.trainer.rollout.ledger import Assignment, TaskLedger

# Runs one episode under labels that name it. What goes wrong inside is in its result, never raised.
RunEpisode = Callable[[Task, Mapping[str, str]], Awaitable[EpisodeResult]]
# Hears of an episode, with its labels, that will be run soon.
Announce = Callable[[Task, Mapping[str, str]], None]


@dataclass(slots=True)
class RolloutCounters:
    """What the worker has done since it was made."""

    episodes: int = 0  # ended, failed ones included
    turns: int = 0
    sampled_tokens: int = 0
    mismatches: int = 0  # episodes whose session reports a tito_session_mismatch
    seconds: float = 0.0  # summed over episodes
    groups: int = 0  # finished, whatever the buffer did with them
    aborted: int = 0  # episodes that were not needed any more
    failures: Counter[str] = field(default_factory=Counter)  # by cause


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How a worker collects; the keys of `[rollout]` of the same names."""

    samples_per_prompt: int
    episodes_in_flight: int
    max_failures_in_a_row: int
    over_sampling: int = 0
    refill: Literal["sample", "group"] = "sample"

    @classmethod
    def of(cls, section: RolloutSection) -> "RolloutSettings":
        return cls(**{key.name: getattr(section, key.name) for key in fields(cls)})


class Places:
    """Things of which so many may be under way. One taker at a time; places come back one by one."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._changed = asyncio.Event()

    async def take(self, count: int = 1) -> None:
        """Wait until `count` places are free together, and take them."""
        while self._free < count:
            self._changed.clear()
            await self._changed.wait()
        self._free -= count

    def give_back(self, count: int = 1) -> None:
        self._free += count
        self._changed.set()

    def close(self) -> None:
        """There are no free places until some are given back."""
        self._free = 0


class RolloutWorker:
    """Runs the assignments of a ledger and puts every finished group into the buffer.

    A group starts when places for all its episodes are free together and `admit` returns. With
    `refill = "sample"` each ended episode gives its place back at once, so that a slow one holds up no
    other; with `"group"` all come back when the last has ended.

    `over_sampling` episodes more than `samples_per_prompt` are started; once so many usable ones have
    ended, the rest are aborted. A failed episode counts in its group's `failures`. What becomes of a group
    with too few usable episodes is the buffer's decision.

    `on_episode` hears of every ended episode, with its seconds. With `announce` the next group is chosen
    while it waits for its places, and its episodes are announced.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        *,
        ledger: TaskLedger,
        buffer: Buffer,
        run_episode: RunEpisode,
        admit: Callable[[], Awaitable[None]] | None = None,
        on_episode: Callable[[EpisodeResult, float], None] = lambda result, seconds: None,
        announce: Announce | None = None,
        version: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = RolloutCounters()
        self.in_flight = 0
        self._settings = settings
        self._ledger = ledger
        self._buffer = buffer
        self._run_episode = run_episode
        self._admit = admit or buffer.room
        self._on_episode = on_episode
        self._announce = announce
        self._clock = clock
        self._places = Places(settings.episodes_in_flight)
        self._per_group = settings.samples_per_prompt + settings.over_sampling
        self._failing: Counter[str] = Counter()  # causes of the failures since the last usable episode
        self._version = version
        self._collecting: dict[asyncio.Task[None], Assignment] = {}
        self._begun_under: dict[asyncio.Task[None], int] = {}  # the version that was published then
        self._begun: set[int] = set()  # groups whose places come back with their episodes

    async def run(self) -> None:
        """Collect until cancelled; then every episode is cancelled and has cleaned up before this returns.

        Raises `UserError` when `max_failures_in_a_row` episodes in a row have failed.
        """
        try:
            async with asyncio.TaskGroup() as groups:
                while True:
                    assignment = await self._next()
                    task = groups.create_task(self._collect(assignment))
                    self._collecting[task], self._begun_under[task] = assignment, self._version()
                    task.add_done_callback(self._collected)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    async def _next(self) -> Assignment:
        """The group that starts now."""
        chosen = self._ledger.next() if self._announce is not None else None
        try:
            if chosen is not None and self._announce is not None:
                for member in range(self._per_group):
                    self._announce(chosen.task, _labels(chosen, member))
            await self._places.take(self._per_group)
            await self._admit()
        except BaseException:
            if chosen is not None:
                self._ledger.give_back(chosen)
            raise
        return chosen or self._ledger.next()

    def under_way(self) -> list[int]:
        """The versions under which the groups under way were begun."""
        return list(self._begun_under.values())

    async def one_finished(self) -> None:
        """Wait until a group under way is finished and put."""
        await asyncio.wait(self._begun_under, return_when=asyncio.FIRST_COMPLETED)

    async def abort(self) -> None:
        """Cancel every group under way and wait for its clean-up; the ledger hands them out again."""
        collecting = list(self._collecting)
        for task in collecting:
            task.cancel()
        if collecting:
            await asyncio.wait(collecting)

    def _collected(self, task: "asyncio.Task[None]") -> None:
        assignment = self._collecting.pop(task)
        del self._begun_under[task]
        if task.cancelled():
            self._ledger.give_back(assignment)
        if assignment.index not in self._begun:  # aborted before its first step
            self._places.give_back(self._per_group)
        self._begun.discard(assignment.index)

    async def _collect(self, assignment: Assignment) -> None:
        self._begun.add(assignment.index)
        started = self._clock()
        try:
            results = await self._attempt(assignment)
        finally:
            if self._settings.refill == "group":
                self._places.give_back(self._per_group)
        group = Group(assignment.task.id, [], assignment.index, assignment.attempt)
        group.metadata["seconds"] = self._clock() - started
        for number, result in enumerate(results):
            samples = samples_of(result, number)
            group.samples += samples
            if not samples:
                group.failures.append(failure_cause(result))
        self.counters.groups += 1
        await self._buffer.put(group)

    async def _attempt(self, assignment: Assignment) -> list[EpisodeResult]:
        """The results of one group: at most `samples_per_prompt` usable ones, and the failed."""
        wanted = self._settings.samples_per_prompt
        ended: dict[int, EpisodeResult] = {}
        usable = 0
        async with asyncio.TaskGroup() as episodes:
            members: dict[asyncio.Task[EpisodeResult], int] = {}
            for member in range(self._per_group):
                task = episodes.create_task(self._episode(assignment, member))
                members[task] = member
                if self._settings.refill == "sample":
                    task.add_done_callback(lambda _: self._places.give_back())
            waiting = set(members)
            while waiting and usable < wanted:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=members.__getitem__):
                    good = bool(samples_of(task.result(), 0))
                    if not good or usable < wanted:
                        ended[members[task]] = task.result()
                        usable += good
            for task in waiting:
                task.cancel()
        self.counters.aborted += len(waiting)
        return [ended[member] for member in sorted(ended)]

    async def _episode(self, assignment: Assignment, member: int) -> EpisodeResult:
        labels = _labels(assignment, member)
        started = self._clock()
        self.in_flight += 1
        try:
            result = await self._run_episode(assignment.task, labels)
        finally:
            self.in_flight -= 1
        self._count(result, self._clock() - started)
        return result

    def _count(self, result: EpisodeResult, seconds: float) -> None:
        counters = self.counters
        counters.episodes += 1
        counters.turns += result.turns
        counters.sampled_tokens += sum(sum(trajectory.loss_mask) for trajectory in result.trajectories)
        counters.mismatches += bool(result.mismatches)
        counters.seconds += seconds
        self._on_episode(result, seconds)
        if samples_of(result, 0):
            self._failing.clear()
            return
        cause = failure_cause(result)
        counters.failures[cause] += 1
        self._failing[cause] += 1
        if self._failing.total() >= self._settings.max_failures_in_a_row:
            causes = ", ".join(f"{times} x {name}" for name, times in self._failing.most_common())
            raise UserError(
                f"{self._failing.total()} episodes in a row failed ({causes}); the last one said: "
                f"{result.error or 'nothing'} Mend that or raise rollout.max_failures_in_a_row, then "
                "continue the run with --resume."
            )


def _labels(assignment: Assignment, member: int) -> dict[str, str]:
    """What names one episode of a group."""
    return {"group": str(assignment.index), "attempt": str(assignment.attempt), "member": str(member)}


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
            routes=None if trajectory.routes is None else route_array(trajectory.routes),
            metadata={
                "session": trajectory.session_id,
                "leaf": trajectory.leaf,
                "turns": trajectory.turns,
                "outcome": episode.outcome,
                "finish_reason": trajectory.finish_reason,
                "findings": findings_in(episode, trajectory),
            },
        )
        for trajectory in episode.trajectories
        if any(trajectory.loss_mask)
    ]


def findings_in(episode: EpisodeResult, trajectory: Trajectory) -> list[Finding]:
    """What `tito_session_mismatch` found in one trajectory; what several share is with the first."""
    return [finding for finding in episode.findings if finding["leaf"] == trajectory.leaf]


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that made its task group give up; the others are what it cancelled."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
