"""What a session may still sample, when several of its turns are on their way at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from titogym.gateway.errors import context_exceeded
from titogym.gateway.sessions.policies import Placement
from titogym.gateway.sessions.spec import Limits
from titogym.gateway.sessions.tree import Node, Tree


@dataclass(slots=True, eq=False)
class Seat:
    """A turn on its way. `tokens` is the most that it may sample, 0 where the session has no such budget;
    `parent` is the turn that it continues."""

    tokens: int = 0
    parent: Node | None = None


@dataclass(slots=True)
class Budget:
    """Counts each turn on its way as if it sampled all that it may.

    A turn that finds nothing left waits until those before it have used theirs, or given it back.
    """

    limits: Limits
    tree: Tree
    _taken: set[Seat] = field(default_factory=set)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def seat(self, most: int | None) -> AsyncIterator[Seat]:
        """A place for a turn that asks for at most so many tokens."""
        seat = Seat()
        while self._taken and self._exhausted():
            await self._news.wait()
        left = self._left()
        if left is not None:
            seat.tokens = max(0, left if most is None else min(most, left))
        self._taken.add(seat)
        try:
            yield seat
        finally:
            self._taken.discard(seat)
            self._news.set()
            self._news = asyncio.Event()

    def allow(self, seat: Seat, placement: Placement) -> int | None:
        """Tokens that the turn may sample, None where there is no limit. Raises `RequestError` at 0.

        The turn that it is sampled in place of gives back what it took, unless another turn continues it.
        """
        limits, tree, again = self.limits, self.tree, placement.supersedes
        seat.parent = placement.parent
        continued = again in {other.parent for other in self._taken}
        returned = again if again is not None and tree.counts(again) and not continued else None
        others = len(self._taken) - 1
        if limits.turns is not None and self._turns() + others - (1 if returned else 0) >= limits.turns:
            raise context_exceeded(f"The session has used its budget of {limits.turns} turns.", "turns")
        left = self._left()
        if left is None:
            return None
        left += seat.tokens + (len(returned.generation.output_ids) if returned else 0)
        if left <= 0:
            raise context_exceeded(f"The session has used its budget of {limits.tokens} tokens.", "tokens")
        return left

    def _exhausted(self) -> bool:
        """Whether all that is left is held by turns on their way."""
        turns, left = self.limits.turns, self._left()
        return (turns is not None and self._turns() + len(self._taken) >= turns) or (
            left is not None and left <= 0
        )

    def _revived(self) -> list[Node]:
        """Turns that were sampled again, and count once more because others on their way continue them."""
        continued = {seat.parent for seat in self._taken}
        return [node for node in continued if node is not None and not self.tree.counts(node)]

    def _turns(self) -> int:
        return self.tree.turns() + len(self._revived())

    def _left(self) -> int | None:
        """Tokens that neither were sampled nor may be by a turn on its way."""
        if self.limits.tokens is None:
            return None
        sampled = self.tree.sampled_tokens()
        sampled += sum(len(node.generation.output_ids) for node in self._revived())
        return self.limits.tokens - sampled - sum(seat.tokens for seat in self._taken)
