"""How often and how patiently sandboxes are asked of a service that others use too.

Starts are spread by a token bucket; a refusal (too many requests, a failing server) is tried again after
a growing, jittered pause, or after the pause that the service names. All of it happens before an
episode's agent starts, so none of it counts as the agent's time.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CreationPolicy:
    """`rate` creations a second in the long run and `burst` at once; `attempts` tries of each.

    Before try n+1 it waits up to `pause` * 2^(n-1) s, at most `longest_pause` s ("full jitter"), or as long
    as the service asks, though not longer than `longest_wait` s.
    """

    rate: float = 10.0
    burst: int = 20
    attempts: int = 6
    pause: float = 0.5
    longest_pause: float = 30.0
    longest_wait: float = 120.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A failure that may pass. `retry_after` (s) is what the service asked for, None where it did not."""

    retry_after: float | None = None


class Creation:
    """Applies one policy to all creations of a backend.

    `refusal` says whether an error may pass: the statuses 429 and 5xx, a connection that broke.
    """

    def __init__(self, policy: CreationPolicy, refusal: Callable[[Exception], Refusal | None]) -> None:
        self._policy = policy
        self._refusal = refusal
        self._chance = random.Random()
        self._tokens = float(policy.burst)
        self._counted = time.monotonic()

    async def __call__(self, create: Callable[[], Awaitable[T]]) -> T:
        """`create()`, tried again while it is refused. The last error is raised as it came.

        `create` must itself undo what a failed try may have made.
        """
        for attempt in range(1, self._policy.attempts + 1):
            await self._turn()
            try:
                return await create()
            except Exception as error:
                refusal = self._refusal(error)
                if refusal is None or attempt == self._policy.attempts:
                    raise
                seconds = self._seconds(attempt, refusal)
                log.info("creating a sandbox was refused (%s): trying again in %.1f s", error, seconds)
                await asyncio.sleep(seconds)
        raise AssertionError("the last attempt returns or raises")

    async def _turn(self) -> None:
        """Wait for a token of the bucket."""
        now = time.monotonic()
        self._tokens = min(
            float(self._policy.burst), self._tokens + (now - self._counted) * self._policy.rate
        )
        self._counted = now
        self._tokens -= 1  # below zero: those who wait stand in line
        if self._tokens < 0:
            await asyncio.sleep(-self._tokens / self._policy.rate)

    def _seconds(self, attempt: int, refusal: Refusal) -> float:
        policy = self._policy
        most = min(policy.longest_pause, policy.pause * 2 ** (attempt - 1))
        if refusal.retry_after is not None:  # not all at the very moment that the service named
            return min(policy.longest_wait, refusal.retry_after) + self._chance.uniform(0, policy.pause)
        return self._chance.uniform(0, most)
