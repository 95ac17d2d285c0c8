"""Which engine serves a session: the same one as long as it can, so that its prefix cache is used."""

import asyncio
import contextlib
import math
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from titogym.gateway.alias import alias
from titogym.gateway.engines.base import (
    Chunk,
    Engine,
    EngineError,
    EngineInfo,
    NoEngineError,
    SamplingParams,
    VersionSpan,
)

_HEADROOM = 1.25  # an engine may carry this many times the mean load before sessions are sent elsewhere
_MOST_ATTEMPTS = 16  # of one request: an engine that ends it for new weights is asked again
# What reading an answer raises that is none of an engine's.
_NONSENSE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_SMALL_LOAD = 4  # requests in flight that never make an engine count as overloaded


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """`state` is "up", "down" or "draining"; `in_flight` counts this gateway's requests."""

    url: str
    state: str
    in_flight: int


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
        self._draining: set[Engine] = set()
        self._load = dict.fromkeys(self.engines, 0)  # requests in flight
        self._lengths: dict[Engine, int] = {}  # context length, of those that were asked
        self._unseeded: set[Engine] = set()
        self._checks: asyncio.Task[None] | None = None

    async def choose(self, session_id: str) -> Engine:
        """The engine for a session's next request. Raises `NoEngineError` when none answers.

        What it returns is good for one `generate`. If the engine fails, the request goes on to the next one
        in the session's order; `url` then names the one that really served.
        """
        await self._look()
        return _Route(self._preferred(session_id), self._load, self._down, alias(session_id))

    def statuses(self) -> list[EngineStatus]:
        return [EngineStatus(engine.url, self._state(engine), self._load[engine]) for engine in self.engines]

    def drain(self, url: str, draining: bool = True) -> EngineStatus | None:
        """Give the engine no new requests, or give it some again; None when there is no such engine."""
        for engine in self.engines:
            if engine.url == url.rstrip("/"):
                (self._draining.add if draining else self._draining.discard)(engine)
                return EngineStatus(engine.url, self._state(engine), self._load[engine])
        return None

    def _state(self, engine: Engine) -> str:
        return "down" if engine in self._down else "draining" if engine in self._draining else "up"

    async def context_length(self) -> int:
        """Tokens of prompt and output that every engine takes which answers. Raises `NoEngineError`."""
        await self._look()
        unknown = [e for e in self.engines if e not in self._lengths and e not in self._down]
        for engine, answer in (await self._infos(unknown)).items():
            if isinstance(answer, EngineInfo):
                self._lengths[engine] = answer.context_length
                (self._unseeded.discard if answer.seeded else self._unseeded.add)(engine)
            elif isinstance(answer, (EngineError, *_NONSENSE)):
                self._down.add(engine)
            else:
                raise answer
        if not self._lengths:
            raise self._none_left()
        return min([*self._lengths.values(), *([] if self._limit is None else [self._limit])])

    @property
    def seeded(self) -> bool:
        """Whether every engine that was asked samples by the seed of a request."""
        return not self._unseeded

    async def ready(self) -> bool:
        """Whether an engine answers now."""
        await self._check()
        return any(self._state(engine) == "up" for engine in self.engines)

    async def close(self) -> None:
        if self._checks is not None:
            self._checks.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._checks
        for engine in self.engines:
            await engine.close()

    async def _infos(self, engines: Sequence[Engine]) -> dict[Engine, EngineInfo | BaseException]:
        """What the engines say of themselves; one that is silent is left out once a check finds it down."""
        asked = {asyncio.ensure_future(engine.info()): engine for engine in engines}
        try:
            waiting = set(asked)
            while waiting:
                _, waiting = await asyncio.wait(waiting, timeout=self._interval / 4)
                waiting = {info for info in waiting if asked[info] not in self._down}
            said = {engine: info for info, engine in asked.items() if info.done()}
            return {engine: info.exception() or info.result() for engine, info in said.items()}
        finally:
            for info in asked:
                info.cancel()

    def _preferred(self, session_id: str) -> list[Engine]:
        """Engines to try for a session, best first. Raises `NoEngineError` when all are down."""
        up = [engine for engine in self.engines if self._state(engine) == "up"]
        if not up:
            raise self._none_left()
        ranked = sorted(up, key=lambda engine: blake2b(f"{session_id}\0{engine.url}".encode()).digest())
        mean = (sum(self._load[engine] for engine in up) + 1) / len(up)
        bound = max(_SMALL_LOAD, math.ceil(_HEADROOM * mean))
        return sorted(ranked, key=lambda engine: self._load[engine] >= bound)  # stable: keeps the ranking

    def _none_left(self) -> NoEngineError:
        urls = ", ".join(engine.url for engine in self.engines)
        what = "is left" if self._draining else "answers"
        return NoEngineError(f"none of the engines {what}: {urls}", retry_after=self._interval)

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
            healthy = False
            with contextlib.suppress(*_NONSENSE):
                healthy = await engine.healthy()
            if healthy:
                if engine in self._down:
                    self._down.remove(engine)
                    self._lengths.pop(engine, None)  # it may have come back with another model
            else:
                self._down.add(engine)

        await asyncio.gather(*(check(engine) for engine in self.engines))


class _Route:
    """One request's way through the pool.

    An engine that fails before its first token gives way to the next. One that dies later, or ends the
    request for new weights, does not lose it either: the next one, or the same, continues behind the tokens
    that were sampled.
    """

    def __init__(
        self, engines: list[Engine], load: dict[Engine, int], down: set[Engine], affinity: str
    ) -> None:
        self._engines = engines
        self._load = load
        self._down = down
        self._affinity = affinity
        self._serving = engines[0]
        self._rid = ""

    @property
    def url(self) -> str:
        return self._serving.url

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        rid: str,
        stream: bool,
        routes_from: int | None = None,
        affinity: str = "",
    ) -> AsyncGenerator[Chunk]:
        so_far = _SoFar()
        queue = deque(self._engines)
        for attempt in range(_MOST_ATTEMPTS):
            engine = self._serving = queue[0]
            self._rid = f"{rid}-{attempt}" if attempt else rid
            self._load[engine] += 1
            try:
                chunks = engine.generate(
                    [*input_ids, *so_far.ids] if so_far.ids else input_ids,
                    replace(params, max_new_tokens=params.max_new_tokens - len(so_far.ids)),
                    rid=self._rid,
                    stream=stream,
                    routes_from=routes_from,
                    affinity=affinity or self._affinity,
                )
                async with contextlib.aclosing(chunks), contextlib.aclosing(_sound(chunks)) as sound:
                    async for chunk in sound:
                        ended = chunk.finish is not None and chunk.finish.reason == "abort"
                        chunk = so_far.add(chunk)
                        if ended and so_far.may_go_on(params):
                            yield replace(chunk, finish=None)
                            break
                        yield chunk
                    else:
                        return
            except EngineError as error:
                if error.status is not None and error.status < 500:
                    raise  # the request is at fault: another engine would refuse it too
                if error.status is None:
                    self._down.add(engine)  # until a health check finds it up
                queue.popleft()
                if not queue or (so_far.ids and not so_far.may_go_on(params)):
                    raise
                so_far.broken_off()
            finally:
                self._load[engine] -= 1
        raise EngineError(f"{self.url} ended the request {_MOST_ATTEMPTS} times", 503)

    async def abort(self, rid: str) -> None:
        await self._serving.abort(self._rid or rid)

    async def info(self) -> EngineInfo:
        return await self._serving.info()

    async def healthy(self) -> bool:
        return await self._serving.healthy()

    async def close(self) -> None:
        """The pool owns the connections."""


async def _sound(chunks: AsyncGenerator[Chunk]) -> AsyncGenerator[Chunk]:
    """The chunks as they are; what cannot be read, or cannot be, is the engine's failure."""
    try:
        async for chunk in chunks:
            _check(chunk)
            yield chunk
    except EngineError as error:
        if isinstance(error.status, int | None):
            raise
        raise EngineError(str(error), 502) from error
    except _NONSENSE as error:
        raise EngineError(f"its answer makes no sense: {error!r}", 502) from error


def _check(chunk: Chunk) -> None:
    if min(array("i", chunk.output_ids), default=0) < 0:
        raise ValueError("a token below 0")
    if not all(map(math.isfinite, array("f", chunk.logprobs))):
        raise ValueError("a log-prob that is not finite")
    finish = chunk.finish
    if finish is not None:
        if finish.reason not in ("stop", "length", "abort"):
            raise ValueError(f"finished for {finish.reason!r}")
        counts = [finish.prompt_tokens, finish.cached_tokens, finish.unpaired]
        for span in finish.version_spans:
            counts += (span.start, span.end)
        array("q", counts)


class _SoFar:
    """What a request has sampled, over all its attempts."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._spans: list[VersionSpan] = []  # of the attempts that are over
        self._start = 0  # of this attempt, in `ids`
        self._versions: list[VersionSpan] = []  # of this attempt, chunk by chunk
        self._certain = True  # each span is known to the token

    def add(self, chunk: Chunk) -> Chunk:
        """The chunk as part of the whole request."""
        first, version = len(self.ids), chunk.version
        self.ids += chunk.output_ids
        if self._versions and len(chunk.output_ids) > 1 and self._versions[-1].version != version:
            self._certain = False  # the weights changed somewhere within the chunk
        self._versions.append(VersionSpan(first, len(self.ids), version))
        finish = chunk.finish
        if finish is None:
            return chunk
        spans = (
            replace(s, start=s.start + self._start, end=s.end + self._start) for s in finish.version_spans
        )
        self._spans += spans
        whole = replace(
            finish,
            version_spans=_joined(self._spans),
            prompt_tokens=finish.prompt_tokens - self._start,
            cached_tokens=min(finish.cached_tokens, finish.prompt_tokens - self._start),
            unpaired=self._start + finish.unpaired,
        )
        self._start, self._versions, self._certain = len(self.ids), [], True
        return replace(chunk, finish=whole)

    def broken_off(self) -> None:
        """The attempt ended without a finish."""
        self._spans += self._versions
        self._start, self._versions = len(self.ids), []

    def may_go_on(self, params: SamplingParams) -> bool:
        """Whether an engine that is given the tokens so far as its prompt goes on as if they were its own.

        It knows neither half a stop string in them, nor what a grammar or a penalty has seen.
        """
        return (
            self._certain
            and len(self.ids) < params.max_new_tokens
            and not (self.ids and self.ids[-1] in params.stop_token_ids)
            and not (params.stop or params.json_schema or params.structural_tag)
            and params.frequency_penalty == params.presence_penalty == 0
        )


def _joined(spans: list[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Touching spans of one version as one."""
    joined: list[VersionSpan] = []
    for span in spans:
        if span.start == span.end:
            continue
        if joined and (joined[-1].end, joined[-1].version) == (span.start, span.version):
            joined[-1] = replace(joined[-1], end=span.end)
        else:
            joined.append(span)
    return tuple(joined)
