"""Affinity, bounded load and failover of the engine pool."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.doubles.scripted_engine import Fault, ScriptedEngine
from titogym.gateway.engines.base import Engine, EngineError, NoEngineError, SamplingParams
from titogym.gateway.engines.pool import EnginePool
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


async def test_no_failover_in_mid_stream(pool: EnginePool, servers: list[ScriptedEngine]) -> None:
    route = await pool.choose("session")
    serving(servers, route.url).faults.append(Fault("drop", after_tokens=1))
    with pytest.raises(EngineError):
        await sample(route)
    assert sum(len(server.requests) for server in servers) == 1
    assert (await pool.choose("session")).url != route.url


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
