"""Affinity, bounded load and failover of the engine pool."""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from tests.doubles.scripted_engine import Fault, ScriptedEngine
from tests.engines.test_client import eventually
from titogym.gateway.engines.base import (
    Chunk,
    Engine,
    EngineError,
    Finish,
    NoEngineError,
    SamplingParams,
    VersionSpan,
)
from titogym.gateway.engines.control import EngineControl, PauseMode
from titogym.gateway.engines.pool import EnginePool, EngineStatus
from titogym.gateway.engines.sglang import SGLangEngine

SESSIONS = [f"session-{i}" for i in range(60)]


def script(prompt: list[int], params: dict[str, Any]) -> list[int]:
    return [7, 8, 9]


@pytest.fixture
async def servers() -> AsyncIterator[list[ScriptedEngine]]:
    servers = [ScriptedEngine(script) for _ in range(3)]
    for server in servers:
        server.start()
    yield servers
    for server in servers:
        await asyncio.to_thread(server.stop)


@pytest.fixture
async def pool(servers: list[ScriptedEngine]) -> AsyncIterator[EnginePool]:
    pool = EnginePool([SGLangEngine(server.url, timeout=5) for server in servers], interval=0.1)
    yield pool
    await pool.close()


async def sample(engine: Engine, rid: str = "r") -> list[int]:
    params = SamplingParams(max_new_tokens=3)
    chunks = [chunk async for chunk in engine.generate([5], params, rid=rid, stream=True)]
    return [token for chunk in chunks for token in chunk.output_ids]


def serving(servers: list[ScriptedEngine], url: str) -> ScriptedEngine:
    return next(server for server in servers if server.url == url)


async def test_a_session_keeps_its_engine(pool: EnginePool) -> None:
    first = {session: (await pool.choose(session)).url for session in SESSIONS}
    assert first == {session: (await pool.choose(session)).url for session in SESSIONS}
    counts = Counter(first.values())
    assert len(counts) == 3
    assert max(counts.values()) < 35


async def test_only_the_sessions_of_a_dead_engine_move(
    pool: EnginePool, servers: list[ScriptedEngine]
) -> None:
    before = {session: (await pool.choose(session)).url for session in SESSIONS}
    await asyncio.to_thread(servers[0].stop)
    await sample(await pool.choose(next(s for s in SESSIONS if before[s] == servers[0].url)))
    after = {session: (await pool.choose(session)).url for session in SESSIONS}
    for session in SESSIONS:
        assert after[session] != servers[0].url
        assert after[session] == before[session] or before[session] == servers[0].url
    assert {after[s] for s in SESSIONS if before[s] == servers[0].url} == {servers[1].url, servers[2].url}


async def test_load_is_bounded(pool: EnginePool, servers: list[ScriptedEngine]) -> None:
    for server in servers:
        server.token_latency = 0.2

    async def turn(rid: str) -> None:
        await sample(await pool.choose("hot"), rid)

    turns = []
    for i in range(30):
        turns.append(asyncio.create_task(turn(str(i))))
        await asyncio.sleep(0.01)
    await asyncio.gather(*turns)
    assert sum(len(server.requests) for server in servers) == 30
    assert max(server.most_in_flight for server in servers) <= 14  # ceil(1.25 * 31 / 3), and 10 is the mean


async def test_failover_before_the_first_token(pool: EnginePool, servers: list[ScriptedEngine]) -> None:
    route = await pool.choose("session")
    preferred = route.url
    serving(servers, preferred).faults.append(Fault("drop"))
    assert await sample(route) == [7, 8, 9]
    assert route.url != preferred


async def test_a_server_error_fails_over_but_a_refusal_does_not(
    pool: EnginePool, servers: list[ScriptedEngine]
) -> None:
    route = await pool.choose("session")
    preferred = route.url
    serving(servers, preferred).faults.append(Fault("error", status=500))
    assert await sample(route) == [7, 8, 9]
    assert route.url != preferred
    route = await pool.choose("session")
    assert route.url == preferred  # an answer, if a bad one, is no sign of death
    serving(servers, preferred).faults.append(Fault("error", status=400))
    with pytest.raises(EngineError) as caught:
        await sample(route)
    assert caught.value.status == 400
    assert sum(len(server.requests) for server in servers) == 3


def counting(prompt: list[int], params: dict[str, Any]) -> list[int]:
    """A row that only depends on where it stands, whoever continues it."""
    return list(range(len(prompt), len(prompt) + 8))


async def whole(engine: Engine, **params: Any) -> tuple[list[int], list[float], Finish]:
    options = SamplingParams(**{"max_new_tokens": 6} | params)
    chunks = [chunk async for chunk in engine.generate([0, 0], options, rid="r", stream=True)]
    finish = chunks[-1].finish
    assert finish is not None
    return (
        [token for chunk in chunks for token in chunk.output_ids],
        [logprob for chunk in chunks for logprob in chunk.logprobs],
        finish,
    )


async def test_a_dying_engine_loses_no_token(pool: EnginePool, servers: list[ScriptedEngine]) -> None:
    for i, server in enumerate(servers):
        server.script, server.weight_version = counting, f"v{i}"
        server.logprob = lambda position, token: -float(token)
    route = await pool.choose("session")
    first = serving(servers, route.url)
    first.faults.append(Fault("drop", after_tokens=4))
    ids, logprobs, finish = await whole(route)
    second = serving(servers, route.url)
    assert second is not first
    assert ids == [2, 3, 4, 5, 6, 7]
    assert logprobs == [-float(token) for token in ids]
    received = len(second.requests[0]["input_ids"]) - 2  # the last tokens may go down with the connection
    assert second.requests[0]["input_ids"] == [0, 0, *ids[:received]]
    assert second.requests[0]["sampling_params"]["max_new_tokens"] == 6 - received
    assert finish.version_spans == (
        VersionSpan(0, received, first.weight_version),
        VersionSpan(received, 6, second.weight_version),
    )
    assert (finish.prompt_tokens, finish.unpaired) == (2, received)
    assert 0 < received <= 4


async def test_what_another_engine_cannot_continue_fails(
    pool: EnginePool, servers: list[ScriptedEngine]
) -> None:
    for params in ({"stop": ("x",)}, {"json_schema": "{}"}, {"frequency_penalty": 0.5}):
        route = await pool.choose("session")
        serving(servers, route.url).script = counting
        serving(servers, route.url).faults.append(Fault("drop", after_tokens=2))
        asked = sum(len(server.requests) for server in servers)
        with pytest.raises(EngineError):
            await whole(route, **params)
        assert sum(len(server.requests) for server in servers) == asked + 1
        assert await pool.ready()


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_no_way_of_pausing_for_new_weights_fails_a_request(
    pool: EnginePool, servers: list[ScriptedEngine], mode: PauseMode
) -> None:
    for server in servers:
        server.script, server.token_latency = counting, 0.2
    route = await pool.choose("session")
    engine = serving(servers, route.url)
    asked = asyncio.create_task(whole(route))
    await eventually(lambda: engine.in_flight == 1)
    await asyncio.sleep(0.5)
    with EngineControl(engine.url) as control:
        await asyncio.to_thread(control.pause, mode)
        assert await pool.ready()
        await asyncio.to_thread(control.set_weight_version, "new")
        await asyncio.sleep(0.05)
        assert not asked.done()
        await asyncio.to_thread(control.resume)
    ids, _, finish = await asked
    assert ids == [2, 3, 4, 5, 6, 7]
    before, after = finish.version_spans
    assert (before.version, after.version, after.end) == ("default", "new", 6)
    assert before.end == after.start > 0
    assert finish.unpaired == (0 if mode == "in_place" else after.start)


async def test_a_draining_engine_finishes_what_it_has(
    pool: EnginePool, servers: list[ScriptedEngine]
) -> None:
    for server in servers:
        server.token_latency = 0.05
    route = await pool.choose("session")
    home = route.url
    running = asyncio.create_task(sample(route))
    await eventually(lambda: serving(servers, home).in_flight == 1)
    status = pool.drain(home + "/")
    assert status == EngineStatus(home, "draining", 1)
    assert (await pool.choose("session")).url != home
    assert await running == [7, 8, 9]
    assert route.url == home
    assert EngineStatus(home, "draining", 0) in pool.statuses()
    for server in servers:
        pool.drain(server.url)
    with pytest.raises(NoEngineError, match="is left") as caught:
        await pool.choose("session")
    assert caught.value.retry_after == 0.1
    assert not await pool.ready()
    pool.drain(home, draining=False)
    assert (await pool.choose("session")).url == home
    assert pool.drain("http://elsewhere") is None


async def test_a_session_keeps_its_rank_and_the_ranks_share_the_sessions() -> None:
    """`routed_dp_rank` of SGLang's `/generate`, sent to servers that say they are data-parallel alone."""
    with ScriptedEngine(script) as alone, ScriptedEngine(script) as parallel:
        parallel.data_parallel = 6
        for server in (alone, parallel):
            pool = EnginePool([SGLangEngine(server.url)], interval=60)
            await pool.context_length()
            for n in range(60):
                for _ in range(2):
                    await sample(await pool.choose(f"session {n}"))
            await pool.close()
        assert not any("routed_dp_rank" in request for request in alone.requests)
        ranks = [request["routed_dp_rank"] for request in parallel.requests]
        assert ranks[::2] == ranks[1::2]
        assert {rank for rank in ranks if 2 <= ranks.count(rank) <= 40} == set(range(6))


async def test_routers_of_sglang_can_keep_a_session_on_one_worker() -> None:
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        engine = SGLangEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        pool = EnginePool([engine], interval=60)
        for session in ("secret-1", "secret-2", "secret-1"):
            pool._down.clear()
            with pytest.raises(EngineError):
                await sample(await pool.choose(session))
        await pool.close()
    keys = [
        line.partition(b": ")[2]
        for head in seen
        for line in head.split(b"\r\n")
        if line.startswith(b"x-smg-routing-key: ")
    ]
    assert len(keys) == 3
    assert keys[0] == keys[2] != keys[1]
    assert not any(b"secret" in head for head in seen)


async def test_none_left_and_back_again(pool: EnginePool, servers: list[ScriptedEngine]) -> None:
    for server in servers:
        await asyncio.to_thread(server.stop)
    with pytest.raises(EngineError):
        await sample(await pool.choose("session"))
    with pytest.raises(NoEngineError, match="none of the engines") as caught:
        await pool.choose("session")
    assert caught.value.retry_after == 0.1
    assert not await pool.ready()
    servers[1].start()
    assert (await pool.choose("session")).url == servers[1].url
    assert await pool.ready()


async def test_a_restarted_engine_gets_its_sessions_back(
    pool: EnginePool, servers: list[ScriptedEngine]
) -> None:
    home = (await pool.choose("session")).url
    await asyncio.to_thread(serving(servers, home).stop)
    assert await sample(await pool.choose("session")) == [7, 8, 9]
    assert (await pool.choose("session")).url != home
    serving(servers, home).start()
    deadline = time.monotonic() + 5
    while (await pool.choose("session")).url != home:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_context_length_is_the_shortest(pool: EnginePool, servers: list[ScriptedEngine]) -> None:
    servers[1].context_length = 1000
    assert await pool.context_length() == 998
    limited = EnginePool([SGLangEngine(server.url) for server in servers], limit=500)
    assert await limited.context_length() == 500
    await limited.close()


async def test_context_length_does_not_wait_for_a_silent_engine(servers: list[ScriptedEngine]) -> None:
    """One that takes connections and says nothing, as a stopped process does, is down by its health check."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        pool = EnginePool([SGLangEngine(url), SGLangEngine(servers[0].url)], interval=0.1)
        async with asyncio.timeout(30):  # a check takes 5 seconds, to say what an engine is a minute
            assert await pool.context_length() == 4094
            assert [status.state for status in pool.statuses()] == ["down", "up"]
        await pool.close()


async def test_context_length_leaves_the_dead_out(pool: EnginePool, servers: list[ScriptedEngine]) -> None:
    servers[1].context_length = 1000
    await asyncio.to_thread(servers[1].stop)
    assert await pool.context_length() == 4094
    servers[1].start()
    deadline = time.monotonic() + 5
    while await pool.context_length() != 998:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_context_length_without_engines() -> None:
    pool = EnginePool([SGLangEngine("http://127.0.0.1:1")])
    with pytest.raises(NoEngineError):
        await pool.context_length()
    await pool.close()


FINISH = Finish("stop", 1, 0, (VersionSpan(0, 1, "v"),))


class Odd(SGLangEngine):
    """Says `said`, or fails as one does whose answer cannot be read."""

    said: Any = KeyError("meta_info")

    async def generate(self, *args: Any, **options: Any) -> AsyncGenerator[Chunk]:
        if isinstance(self.said, Exception):
            raise self.said
        yield self.said

    async def healthy(self) -> bool:
        raise ValueError("no JSON")


@pytest.mark.parametrize(
    "said",
    [
        KeyError("meta_info"),
        EngineError("odd status", "400"),  # type: ignore[arg-type]
        Chunk([-1], [-0.5], "v", FINISH),
        Chunk([1.0], [-0.5], "v", FINISH),  # type: ignore[list-item]
        Chunk([1 << 40], [-0.5], "v", FINISH),
        Chunk([1], [float("-inf")], "v", FINISH),
        Chunk([1], [None], "v", FINISH),  # type: ignore[list-item]
        Chunk([1], [-0.5], "v", replace(FINISH, reason="weird")),  # type: ignore[arg-type]
        Chunk([1], [-0.5], "v", replace(FINISH, cached_tokens=None)),  # type: ignore[arg-type]
    ],
    ids=str,
)
async def test_nonsense_is_the_failure_of_its_engine(servers: list[ScriptedEngine], said: Any) -> None:
    odd = Odd("http://127.0.0.1:1")
    odd.said = said
    alone = EnginePool([odd])
    with pytest.raises(EngineError) as failed:
        await sample(await alone.choose("session"))
    assert failed.value.status == 502
    await alone.close()
    pool = EnginePool([odd, SGLangEngine(servers[0].url)])
    for session in SESSIONS[:8]:
        assert await sample(await pool.choose(session)) == [7, 8, 9]
    await pool.close()


async def test_a_server_that_is_no_engine_is_down_and_the_checks_go_on(
    servers: list[ScriptedEngine],
) -> None:
    pool = EnginePool([Odd("http://127.0.0.1:1"), SGLangEngine(servers[0].url)], interval=0.02)
    await pool.choose("session")
    for stopped, state in ((False, "up"), (True, "down"), (False, "up")):
        if stopped:
            await asyncio.to_thread(servers[0].stop)
        elif state != pool.statuses()[1].state:
            servers[0].start()
        await eventually(lambda state=state: [s.state for s in pool.statuses()] == ["down", state])
    await pool.close()
