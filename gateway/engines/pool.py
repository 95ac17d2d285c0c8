"""Which engine serves a session: the same one as long as it can, so that its prefix cache is used."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Sequence
from hashlib import blake2b

from titogym.gateway.engines.base import (
    Chunk,
    Engine,
    EngineError,
    EngineInfo,
    NoEngineError,
    SamplingParams,
)

_HEADROOM = 1.25  # an engine may carry this many times the mean load before sessions are sent elsewhere
_SMALL_LOAD = 4  # requests in flight that never make an engine count as overloaded


class EnginePool:
    """Spreads sessions over engines and steps around the dead ones.

    Sessions map to engines by rendezvous hashing with bounded load (Mirrokni et al., "Consistent Hashing
    with Bounded Loads", 2018): a session goes to the first engine of its own order of preference that is
    up and not overloaded. When an engine comes or goes only its own sessions move.

    `limit` caps the context length that the engines say. `interval` is between health checks, seconds.
    """

    def __init__(self, engines: Sequence[Engine], *, limit: int | None = None, interval: float = 2.0) -> None:
        self.engines = tuple(engines)
        self._limit = limit
        self._interval = interval
        self._down: set[Engine] = set()
        self._load = dict.fromkeys(self.engines, 0)  # requests in flight
        self._lengths: dict[Engine, int] = {}  # context length, of those that were asked
        self._checks: asyncio.Task[None] | None = None

    async def choose(self, session_id: str) -> Engine:
        """The engine for a session's next request. Raises `NoEngineError` when none answers.

        What it returns is good for one `generate`. If the engine fails before its first token, the request
        goes on to the next one in the session's order; `url` then names the one that really served.
        """
        await self._look()
        return _Route(self._preferred(session_id), self._load, self._down)

    async def context_length(self) -> int:
        """Tokens of prompt and output that every engine takes which answers. Raises `NoEngineError`."""
        await self._look()
        unknown = [e for e in self.engines if e not in self._lengths and e not in self._down]
        answers = await asyncio.gather(*(engine.info() for engine in unknown), return_exceptions=True)
        for engine, answer in zip(unknown, answers, strict=True):
            if isinstance(answer, EngineInfo):
                self._lengths[engine] = answer.context_length
            elif isinstance(answer, EngineError):
                self._down.add(engine)
            else:
                raise answer
        if not self._lengths:
            raise self._none_left()
        return min([*self._lengths.values(), *([] if self._limit is None else [self._limit])])

    async def ready(self) -> bool:
        """Whether an engine answers now."""
        await self._check()
        return len(self._down) < len(self.engines)

    async def close(self) -> None:
        if self._checks is not None:
            self._checks.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._checks
        for engine in self.engines:
            await engine.close()

    def _preferred(self, session_id: str) -> list[Engine]:
        """Engines to try for a session, best first. Raises `NoEngineError` when all are down."""
        up = [engine for engine in self.engines if engine not in self._down]
        if not up:
            raise self._none_left()
        ranked = sorted(up, key=lambda engine: blake2b(f"{session_id}\0{engine.url}".encode()).digest())
        mean = (sum(self._load[engine] for engine in up) + 1) / len(up)
        bound = max(_SMALL_LOAD, math.ceil(_HEADROOM * mean))
        return sorted(ranked, key=lambda engine: self._load[engine] >= bound)  # stable: keeps the ranking

    def _none_left(self) -> NoEngineError:
        urls = ", ".join(engine.url for engine in self.engines)
        return NoEngineError(f"none of the engines answers: {urls}", retry_after=self._interval)

    async def _look(self) -> None:
        """Keep health checks going. When none is known to be up, look now rather than at the next one."""
        if self._checks is None:
            self._checks = asyncio.create_task(self._check_forever())
        if len(self._down) == len(self.engines):
            await self._check()

    async def _check_forever(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await self._check()

    async def _check(self) -> None:
        async def check(engine: Engine) -> None:
            if await engine.healthy():
                if engine in self._down:
                    self._down.remove(engine)
                    self._lengths.pop(engine, None)  # it may have come back with another model
            else:
                self._down.add(engine)

        await asyncio.gather(*(check(engine) for engine in self.engines))


class _Route:
    """One request's way through the pool: an `Engine` that falls over to the next before the first token."""

    def __init__(self, engines: list[Engine], load: dict[Engine, int], down: set[Engine]) -> None:
        self._engines = engines
        self._load = load
        self._down = down
        self._serving = engines[0]

    @property
    def url(self) -> str:
        return self._serving.url

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, *, rid: str, stream: bool
    ) -> AsyncGenerator[Chunk]:
        for engine in self._engines:
            self._serving = engine
            self._load[engine] += 1
            started = False
            try:
                chunks = engine.generate(input_ids, params, rid=rid, stream=stream)
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        started = True
                        yield chunk
                return
            except EngineError as error:
                if error.status is not None and error.status < 500:
                    raise  # the request is at fault: another engine would refuse it too
                if error.status is None:
                    self._down.add(engine)  # until a health check finds it up
                if started or engine is self._engines[-1]:
                    raise
            finally:
                self._load[engine] -= 1

    async def abort(self, rid: str) -> None:
        await self._serving.abort(rid)

    async def info(self) -> EngineInfo:
        return await self._serving.info()

    async def healthy(self) -> bool:
        return await self._serving.healthy()

    async def close(self) -> None:
        """The pool owns the connections."""
