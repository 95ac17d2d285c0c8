"""Where finished groups wait for the trainer: whole groups, bounded in number and in age."""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from titogym.trainer.batch import Group, Sample

Reason = Literal["stale", "retries_exhausted"]


@dataclass(frozen=True, slots=True)
class Age:
    """How old the weights were that sampled some groups, in published versions behind `current`.

    Only tokens that carry loss count, and only spans whose version is a published one (an integer):
    spans without are left out. All ages are 0 when nothing has a version.

    `old` (S_old) is current minus the oldest version, `post` (S_post) current minus the newest,
    `spread` (Δ_gen) newest minus oldest, `token_weighted` the mean age over tokens, and `coverage` the
    share of samples with at least one version (weight_version_sample_coverage).
    """

    old: int
    post: int
    spread: int
    token_weighted: float
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
        return Age(0, 0, 0, 0.0, 0.0)
    oldest, newest = min(tokens), max(tokens)
    weighted = math.fsum(n * (current - version) for version, n in tokens.items()) / tokens.total()
    return Age(current - oldest, current - newest, newest - oldest, weighted, covered / samples)


def _oldest(group: Group) -> float:
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

    put: int = 0
    taken: int = 0
    stale: int = 0  # rejected at take: retried or dropped
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


class GroupBuffer:
    """A first-in, first-out queue of whole groups between producers and one trainer.

    At most `capacity` groups wait; `put` blocks beyond that, and `room` tells a producer beforehand.
    Age is measured when the trainer takes: a group whose S_old is strictly greater than `max_staleness`
    is rejected. A rejected group goes to `on_retry`, its attempt counted up, while it has attempts left
    (`max_retries`, 0 to never retry), and else to `on_drop` with the reason.

    The same sequence of calls gives the same result. For one event loop; a cancelled call loses nothing
    but the group of a `put` that was still waiting.
    """

    def __init__(
        self,
        *,
        capacity: int,
        max_staleness: int,
        max_retries: int = 0,
        on_retry: Callable[[Group], None] = lambda group: None,
        on_drop: Callable[[Group, Reason], None] = lambda group, reason: None,
        version: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity = capacity
        self.max_staleness = max_staleness
        self.max_retries = max_retries
        self.counters = BufferCounters()
        self.waiting_for_groups = Stopwatch(clock)  # `take` waits: the rollout is behind
        self.waiting_for_room = Stopwatch(clock)  # `room` waits: the trainer is behind
        self._version = version
        self._on_retry = on_retry
        self._on_drop = on_drop
        self._entries: deque[tuple[Group, float]] = deque()  # with the oldest version, inf where none
        self._putting = 0
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
        """Append `group`, waiting while the buffer is full."""
        async with self._changed:
            self._putting += 1
            try:
                await self._changed.wait_for(lambda: len(self._entries) < self.capacity)
                self._entries.append((group, _oldest(group)))
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
        if count > self.capacity:
            raise ValueError(f"cannot take {count} groups from a buffer of capacity {self.capacity}")
        async with self._changed:
            with self.waiting_for_groups.running():
                while self._reject_stale() < count:
                    await self._changed.wait()
            taken = [self._entries.popleft()[0] for _ in range(count)]
            self.counters.taken += count
            self._changed.notify_all()
            return taken

    def _has_room(self) -> bool:
        return len(self._entries) + self._putting < self.capacity

    def _reject_stale(self) -> int:
        """Reject what is too old; how many groups are left."""
        stale = [group for group, oldest in self._entries if self._version - oldest > self.max_staleness]
        if stale:
            self._entries = deque(
                (group, oldest)
                for group, oldest in self._entries
                if self._version - oldest <= self.max_staleness
            )
            for group in stale:
                self._reject(group)
            self._changed.notify_all()
        return len(self._entries)

    def _reject(self, group: Group) -> None:
        self.counters.stale += 1
        if group.attempt < self.max_retries:
            group.attempt += 1
            self.counters.retried += 1
            self._on_retry(group)
        else:
            self.counters.dropped += 1
            self._on_drop(group, "retries_exhausted" if self.max_retries else "stale")
