"""A warm pool: what the next episodes need is made ready while earlier ones run."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from titogym.cancellation import to_its_end

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

KEEP_SECONDS = 900.0  # what has waited longer is destroyed instead: a sandbox's lifetime is limited


@dataclass(slots=True)
class _Made(Generic[T]):
    task: "asyncio.Task[T]"
    since: float = field(default_factory=time.monotonic)


class WarmPool(Generic[K, T]):
    """Makes things ready in the order in which they are announced, at most `size` that nobody has taken.

    `destroy` undoes what is never taken; what is taken is the taker's. A thing that could not be made is
    not offered, so its taker makes it himself and meets the error himself.
    """

    def __init__(
        self, size: int, destroy: Callable[[T], Awaitable[None]], *, keep_seconds: float = KEEP_SECONDS
    ) -> None:
        self._size = size
        self._destroy = destroy
        self._keep_seconds = keep_seconds
        self._announced: deque[tuple[K, Callable[[], Coroutine[Any, Any, T]]]] = deque()
        self._made: dict[K, _Made[T]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def announce(self, key: K, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """`key` will be asked for soon. `make` must undo what it has done when it fails or is cancelled."""
        self._announced.append((key, make))
        self._fill()

    async def take(self, key: K) -> T | None:
        """What was made ready for `key`, waited for if it is under way; None where nothing was."""
        self._announced = deque(entry for entry in self._announced if entry[0] != key)
        made = self._made.get(key)
        if made is None:
            return None
        if made.task.done() and time.monotonic() - made.since > self._keep_seconds:
            self._let_go(key)
            return None
        try:
            await asyncio.wait({made.task})  # it stays ours until it is handed over
        except asyncio.CancelledError:
            self._let_go(key)
            raise
        self._made.pop(key, None)
        self._fill()
        if made.task.cancelled():
            return None
        if error := made.task.exception():
            log.info("nothing could be made ready ahead of an episode: %s", error)
            return None
        return made.task.result()

    def forget(self, key: K) -> None:
        """`key` will not be asked for after all."""
        self._announced = deque(entry for entry in self._announced if entry[0] != key)
        if key in self._made:
            self._let_go(key)

    async def close(self) -> None:
        """Destroy all that was not taken, to its end. Safe to call twice."""
        self._announced.clear()
        for key in list(self._made):
            self._let_go(key)
        await to_its_end(self._ended())

    async def _ended(self) -> None:
        while self._ending:
            await asyncio.wait(self._ending)

    def _fill(self) -> None:
        while self._announced and len(self._made) < self._size:
            key, make = self._announced.popleft()
            if key not in self._made:
                self._made[key] = _Made(asyncio.create_task(make()))

    def _let_go(self, key: K) -> None:
        made = self._made.pop(key)
        made.task.cancel()
        ending = asyncio.create_task(self._end(made.task))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        self._fill()

    async def _end(self, task: "asyncio.Task[T]") -> None:
        await asyncio.wait({task})
        if task.cancelled() or task.exception() is not None:
            return  # it has undone its own work
        try:
            await self._destroy(task.result())
        except Exception as error:
            log.warning("what was made ready and not taken is not destroyed: %s", error)
