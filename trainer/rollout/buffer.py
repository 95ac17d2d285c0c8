"""Where finished groups wait for the trainer: whole groups, bounded in number and in age.

What is known once a group is finished is decided when it is put: failed episodes, timeouts, and the
user's filter. Its age is decided when it is taken, because the trainer's version moves while it waits.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from titogym import dotted
from titogym.errors import UserError
from titogym.trainer.batch import Group, Sample
from titogym.trainer.config.sections import RunConfig

Reason = Literal["stale", "failures", "filtered"]
# Whether the trainer should see a group; text says why not.
Filter = Callable[[Group], bool | str]


@dataclass(frozen=True, slots=True)
class Age:
    """How old the weights were that sampled some groups, in published versions behind `current`.

    Only tokens that carry loss count, and only spans whose version is a published one (an integer):
    spans without are left out. All ages are None when nothing has a version.

    `old` (S_old) is current minus the oldest version, `post` (S_post) current minus the newest,
    `spread` (Δ_gen) newest minus oldest, `token_weighted` the mean age over tokens, and `coverage` the
    share of samples with at least one version (weight_version_sample_coverage).
    """

    old: int | None
    post: int | None
    spread: int | None
    token_weighted: float | None
    coverage: float


def age(groups: Iterable[Group], current: int) -> Age:
    """The age of all samples of `groups` together when version `current` is in training."""
    tokens: Counter[int] = Counter()
    samples = covered = 0
    for group in groups:
        for sample in group.samples:
            of_sample = _loss_tokens_by_version(sample)
            tokens.update(of_sample)
            samples += 1
            covered += bool(of_sample)
    if not tokens:
        return Age(None, None, None, None, 0.0)
    oldest, newest = min(tokens), max(tokens)
    weighted = math.fsum(n * (current - version) for version, n in tokens.items()) / tokens.total()
    return Age(current - oldest, current - newest, newest - oldest, weighted, covered / samples)


def oldest_version(group: Group) -> float:
    """The oldest version among the tokens of `group` that carry loss; infinite where there is none."""
    return min((v for sample in group.samples for v in _loss_tokens_by_version(sample)), default=math.inf)


def _loss_tokens_by_version(sample: Sample) -> Counter[int]:
    tokens: Counter[int] = Counter()
    for start, end, name in sample.version_spans:
        version = published(name)
        count = sum(1 for weight in sample.loss_mask[start:end] if weight > 0)
        if version is not None and count:
            tokens[version] += count
    return tokens


def published(name: str) -> int | None:
    """The version as a number. An engine that was never updated reports a name such as `default`."""
    return int(name) if name.isascii() and name.isdigit() else None


@dataclass(slots=True)
class BufferCounters:
    """Groups that have passed since the buffer was made."""

    put: int = 0  # accepted
    taken: int = 0
    rejected: Counter[Reason] = field(default_factory=Counter)  # retried or dropped
    retried: int = 0
    dropped: int = 0


class Stopwatch:
    """Seconds during which at least one waiter was waiting, the present wait included."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting = 0
        self._since = 0.0
        self._total = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._waiting == 0:
            self._since = self._clock()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if self._waiting == 0:
                self._total += self._clock() - self._since

    def seconds(self) -> float:
        return self._total + (self._clock() - self._since if self._waiting else 0.0)


@dataclass(frozen=True, slots=True)
class BufferSettings:
    """What a buffer is built from. `retried` are the reasons for which a group is collected again."""

    capacity: int
    max_staleness: int = 0
    max_retries: int = 0
    retried: frozenset[Reason] = frozenset({"stale", "failures"})
    min_episodes: int = 1  # usable ones, without which a group is rejected as "failures"
    keep_timeouts: bool = True  # whether an attempt that ran out of time is trained on
    filter: Filter = lambda group: True
    max_filtered_in_a_row: int = 1000
    oldest_first: bool = False  # take groups by age, not in order of arrival, and let late ones in when full

    @classmethod
    def of(cls, config: RunConfig) -> "BufferSettings":
        """Those of a run. Raises `UserError` when the filter is not found."""
        section = config.buffer
        reasons: dict[Reason, str] = {"stale": section.on_stale, "failures": section.on_failure}
        return cls(
            capacity=section.capacity,
            # What earlier weights have sampled is not on-policy, be it left over or from a checkpoint.
            max_staleness=0 if config.trainer.true_on_policy else section.max_staleness,
            max_retries=section.max_retries,
            retried=frozenset(reason for reason, choice in reasons.items() if choice == "retry"),
            min_episodes=config.rollout.min_episodes,
            keep_timeouts=section.on_timeout == "keep",
            filter=FILTERS.get(section.filter) or dotted.load(section.filter, "buffer.filter"),
            max_filtered_in_a_row=section.max_filtered_in_a_row,
            oldest_first=section.on_stale == "wait",
        )


class Buffer(Protocol):
    """What the driver and the rollout worker need of a buffer. `buffer.implementation` names a class.

    It is made as `GroupBuffer` is, and calls `on_retry` or `on_drop` for every group that it does not keep.
    """

    counters: BufferCounters
    waiting_for_groups: Stopwatch
    waiting_for_room: Stopwatch

    def __len__(self) -> int: ...

    def advance(self, version: int) -> None: ...

    async def put(self, group: Group) -> None: ...

    async def room(self) -> None: ...

    async def take(self, count: int) -> list[Group]: ...

    def waiting(self) -> list[Group]: ...

    def restore(self, groups: Sequence[Group]) -> None: ...


class GroupBuffer:
    """A first-in, first-out queue of whole groups between producers and one trainer.

    At most `capacity` groups wait; `put` blocks beyond that, and `room` tells a producer beforehand.

    A group is rejected when it is put if too few of its episodes can be trained on ("failures") or the
    filter does not want it ("filtered"), and when the trainer takes if its S_old is strictly greater than
    `max_staleness` ("stale"): one stale member rejects its group, since the others cannot be compared
    without it, and a group without versions is never stale. A rejected group goes to `on_retry`, its attempt
    counted up, if its reason is among `retried` and it has attempts left, and else to `on_drop`. When all
    that waits is stale, `take` rejects it all and waits for what comes.

    The same sequence of calls gives the same result. For one event loop; a cancelled call loses nothing
    but the group of a `put` that was still waiting.
    """

    def __init__(
        self,
        settings: BufferSettings,
        *,
        on_retry: Callable[[Group, Reason], None] = lambda group, reason: None,
        on_drop: Callable[[Group, Reason], None] = lambda group, reason: None,
        version: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.counters = BufferCounters()
        self.waiting_for_groups = Stopwatch(clock)  # `take` waits: the rollout is behind
        self.waiting_for_room = Stopwatch(clock)  # `room` waits: the trainer is behind
        self._version = version
        self._on_retry = on_retry
        self._on_drop = on_drop
        self._entries: deque[tuple[Group, float]] = deque()  # with the oldest version, inf where none
        self._putting = 0
        self._filtered_in_a_row = 0
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        """Groups that wait to be taken, fresh or not."""
        return len(self._entries)

    @property
    def version(self) -> int:
        """The last published version, against which age is measured."""
        return self._version

    def advance(self, version: int) -> None:
        """`version` has been published. Versions never go back (`ValueError`)."""
        if version < self._version:
            raise ValueError(f"version {version} was published after version {self._version}")
        self._version = version

    async def put(self, group: Group) -> None:
        """Append `group`, waiting while the buffer is full; or reject it at once.

        Raises `UserError` when the filter has refused `max_filtered_in_a_row` groups in a row.
        """
        reason = self._refusal(group)
        if reason is not None:
            self._reject(group, reason)
            return
        async with self._changed:
            self._putting += 1
            try:
                await self._changed.wait_for(self._may_enter)
                self._entries.append((group, oldest_version(group)))
                self.counters.put += 1
            finally:
                self._putting -= 1
                self._changed.notify_all()

    async def room(self) -> None:
        """Wait until a group could be put at once, after those that already wait to be put."""
        async with self._changed:
            if not self._has_room():
                with self.waiting_for_room.running():
                    await self._changed.wait_for(self._has_room)

    async def take(self, count: int) -> list[Group]:
        """The `count` oldest groups that are fresh enough, as soon as there are so many.

        Until then only rejected groups leave. A `count` beyond the capacity would wait for ever and is
        a `ValueError`.
        """
        if count > self.settings.capacity:
            raise ValueError(f"cannot take {count} groups from a buffer of capacity {self.settings.capacity}")
        async with self._changed:
            with self.waiting_for_groups.running():
                while self._reject_stale() < count:
                    await self._changed.wait()
            if self.settings.oldest_first:
                self._entries = deque(sorted(self._entries, key=lambda entry: entry[1]))
            taken = [self._entries.popleft()[0] for _ in range(count)]
            self.counters.taken += count
            self._changed.notify_all()
            return taken

    def waiting(self) -> list[Group]:
        """The groups that wait, in order: what a checkpoint keeps."""
        return [group for group, _ in self._entries]

    def restore(self, groups: Sequence[Group]) -> None:
        """Put back what `waiting` of an earlier buffer gave, ahead of everything else."""
        self._entries.extendleft((group, oldest_version(group)) for group in reversed(groups))
        self.counters.put += len(groups)

    def _may_enter(self) -> bool:
        return self.settings.oldest_first or len(self._entries) < self.settings.capacity

    def _has_room(self) -> bool:
        return len(self._entries) + self._putting < self.settings.capacity

    def _refusal(self, group: Group) -> Reason | None:
        settings = self.settings
        if not settings.keep_timeouts:
            late = {s.episode for s in group.samples if s.metadata.get("outcome") == "timeout"}
            group.samples = [sample for sample in group.samples if sample.episode not in late]
            group.failures += ["timeout"] * len(late)
        if len({sample.episode for sample in group.samples}) < settings.min_episodes:
            return "failures"
        try:
            verdict = settings.filter(group)
        except Exception as error:  # it is the user's own code
            raise UserError(f"The buffer.filter failed on task {group.task_id}: {error!r}") from error
        if verdict is True:
            self._filtered_in_a_row = 0
            return None
        group.metadata["filtered"] = verdict or "filtered"
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row >= settings.max_filtered_in_a_row:
            raise UserError(
                f"The filter has refused {self._filtered_in_a_row} groups in a row "
                f"({group.metadata['filtered']}): choose easier or harder tasks, another buffer.filter, or a "
                "higher buffer.max_filtered_in_a_row."
            )
        return "filtered"

    def _reject_stale(self) -> int:
        """Reject what is too old; how many groups are left."""
        limit = self.settings.max_staleness
        stale = [group for group, version in self._entries if self._version - version > limit]
        if stale:
            self._entries = deque(entry for entry in self._entries if self._version - entry[1] <= limit)
            for group in stale:
                self._reject(group, "stale")
            self._changed.notify_all()
        return len(self._entries)

    def _reject(self, group: Group, reason: Reason) -> None:
        self.counters.rejected[reason] += 1
        if reason in self.settings.retried and group.attempt < self.settings.max_retries:
            group.attempt += 1
            self.counters.retried += 1
            self._on_retry(group, reason)
        else:
            self.counters.dropped += 1
            self._on_drop(group, reason)


def mixed_rewards(group: Group) -> bool | str:
    """Keep groups whose episodes differ in reward: the others have no advantage to learn from.

    (Dynamic sampling of DAPO, Yu et al. 2025, section 3.2.)
    """
    rewards = {sample.episode: sample.reward for sample in group.samples}
    return len(set(rewards.values())) > 1 or f"all rewards {group.samples[0].reward:g}"


FILTERS: dict[str, Filter] = {"none": lambda group: True, "mixed_rewards": mixed_rewards}
