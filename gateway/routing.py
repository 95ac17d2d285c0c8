"""Which engine serves a session: always the same one, so that its prefix cache is used."""

from collections.abc import Sequence
from hashlib import blake2b

from titogym.gateway.engines.base import Engine


class StickyRouter:
    """Spreads sessions over engines by rendezvous hashing. `limit` caps the engines' context length."""

    def __init__(self, engines: Sequence[Engine], limit: int | None = None) -> None:
        self.engines = tuple(engines)
        self._limit = limit
        self._context_length: int | None = None

    async def choose(self, session_id: str) -> Engine:
        return max(self.engines, key=lambda engine: blake2b(f"{session_id}\0{engine.url}".encode()).digest())

    async def context_length(self) -> int:
        if self._context_length is None:
            lengths = [(await engine.info()).context_length for engine in self.engines]
            self._context_length = min([*lengths, *([self._limit] if self._limit else [])])
        return self._context_length

    async def ready(self) -> bool:
        """Whether an engine answers."""
        for engine in self.engines:
            if await engine.healthy():
                return True
        return False

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()
