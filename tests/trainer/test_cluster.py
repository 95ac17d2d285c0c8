"""Engines, gateways, rollout workers and trainers that die: replaced, or named."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.doubles.scripted_engine import ScriptedEngine
from titogym.errors import UserError
from titogym.gateway.launch import GatewayProcess
from titogym.harnesses.episode import EpisodeResult
from titogym.trainer.cluster.base import GatewayOptions, Running, RunningGateway
from titogym.trainer.cluster.local import Local
from titogym.trainer.cluster.supervision import Service, Supervisor

pytestmark = [pytest.mark.train, pytest.mark.sandbox]
USABLE = EpisodeResult("t", "finished", reward=1.0, trajectories=[None])  # type: ignore[list-item]
FAILED = EpisodeResult("t", "engine_error", error="The engine is gone.")


class Scripted:
    """A scripted engine as a server that can die and start again at its address."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.lives = True

    @property
    def url(self) -> str:
        return self.engine.url

    def die(self) -> None:
        self.lives = False
        self.engine.stop()

    def alive(self) -> bool:
        return self.lives

    def ending(self) -> str:
        return "engine stopped with status -9"

    def stop(self) -> None:
        if self.lives:
            self.die()


class World:
    """One engine, one real gateway, and the supervisor of both."""

    def __init__(self, engine: ScriptedEngine, model_dir: Path, directory: Path, restarts: int) -> None:
        self.starter = ThreadPoolExecutor(1)
        self.connected = 0
        self.stillborn = 0  # engines that will die while they start
        self.starts = 0
        self.starting, self.slow_start = threading.Event(), threading.Event()
        self.slow_start.set()
        self.replaced: list[str] = []
        options = GatewayOptions([engine.url], model_dir, directory)
        cluster = Local()

        def again(old: Running) -> Running:
            if self.stillborn:
                self.stillborn -= 1
                raise UserError("The engine stopped with status -9 while starting")
            self.starts += 1
            self.starting.set()
            self.slow_start.wait(10)
            engine.start()
            return Scripted(engine)

        def reconnect() -> None:
            self.connected += 1

        self.engine: Service[Running] = Service("engine", Scripted(engine), again, restarts)
        started = self.starter.submit(cluster.gateway, options).result()
        self.gateway: Service[RunningGateway] = Service(
            "gateway", started, lambda old: cluster.gateway(options, old), restarts
        )
        self.supervisor = Supervisor(
            [self.engine], [self.gateway], reconnect, self.starter, self.replaced.append
        )

    def kill_engine(self) -> None:
        assert isinstance(self.engine.running, Scripted)
        self.engine.running.die()

    def kill_gateway(self) -> None:
        assert isinstance(self.gateway.running, GatewayProcess)
        os.kill(self.gateway.running.child.pid, signal.SIGKILL)
        self.gateway.running.child.process.wait()

    def draining(self) -> bool:
        (status,) = self.ask("GET", "/engines")["engines"]
        return bool(status["state"] == "draining")

    def ask(self, method: str, path: str, body=None):
        gateway = self.gateway.running
        key = {"authorization": f"Bearer {gateway.admin_key}"}
        answer = httpx.request(method, gateway.url + path, headers=key, json=body)
        answer.raise_for_status()
        return answer.json()

    def close(self) -> None:
        self.gateway.running.stop()
        self.starter.shutdown()


@pytest.fixture
def world(engine, model_dir, directory) -> Iterator[World]:
    made = World(engine, model_dir, directory, restarts=2)
    yield made
    made.close()


async def test_a_new_engine_serves_nobody_before_it_has_the_weights(world):
    assert not await world.supervisor.mend()
    world.kill_engine()
    assert await world.supervisor.mend()
    assert world.replaced == ["engine"]
    assert world.connected == 1
    assert world.engine.running.alive()
    assert world.draining()
    assert await world.supervisor.mend()  # still waits for its weights, whoever asks
    assert world.connected == 1
    await world.supervisor.let_in()
    assert not world.draining()
    assert not await world.supervisor.mend()


async def test_a_gateway_comes_back_with_its_sessions(world):
    session = world.ask("POST", "/sessions", {})["id"]
    before = world.gateway.running.address
    world.kill_gateway()
    assert not await world.supervisor.mend()  # no weights were lost
    assert world.gateway.running.address == before
    assert [one["id"] for one in world.ask("GET", "/sessions")["sessions"]] == [session]
    assert world.connected == 0


async def test_a_gateway_waits_for_engines_that_may_not_serve_yet(world):
    world.kill_engine()
    world.kill_gateway()
    assert await world.supervisor.mend()
    assert not world.gateway.running.alive()
    await world.supervisor.let_in()
    assert world.gateway.running.alive()
    assert not world.draining()


async def test_an_engine_that_dies_while_it_starts_is_started_again(world):
    world.kill_engine()
    world.stillborn = 1
    assert await world.supervisor.mend()
    assert world.engine.running.alive()
    assert world.engine.restarts == 0
    world.kill_engine()
    with pytest.raises(UserError, match=r"engine stopped with status -9(.|\n)*max_restarts"):
        await world.supervisor.mend()


async def test_an_engine_that_comes_up_after_nobody_waits_for_it_is_kept(world):
    """As when the trainer dies while an engine starts: its mending is cancelled, and the next one begins."""
    world.kill_engine()
    world.slow_start.clear()
    mending = asyncio.create_task(world.supervisor.mend())
    await asyncio.to_thread(world.starting.wait, 10)
    mending.cancel()
    await asyncio.wait([mending])
    threading.Timer(0.3, world.slow_start.set).start()
    assert await world.supervisor.mend()
    assert world.engine.running.alive()
    assert world.starts == 1


async def test_what_dies_too_often_is_an_error_that_names_it(world):
    for _ in range(2):
        world.kill_gateway()
        await world.supervisor.mend()
    world.kill_gateway()
    with pytest.raises(UserError, match=r"gateway stopped with status -9(.|\n)*max_restarts"):
        await world.supervisor.mend()


async def test_episodes_that_lost_their_engine_run_again_once_it_is_back(world):
    runs = []

    async def episode() -> EpisodeResult:
        runs.append(world.engine.running.alive())
        if len(runs) == 1:
            world.kill_engine()
            return FAILED
        return USABLE

    ended = asyncio.create_task(world.supervisor.episode(episode))
    await asyncio.sleep(0.1)
    assert runs == [True]
    await world.supervisor.mend()
    await asyncio.sleep(0.1)
    assert not ended.done()
    await world.supervisor.let_in()
    assert await ended is USABLE
    assert runs == [True, True]


async def test_other_failures_are_not_run_again(world):
    runs = 0

    async def episode() -> EpisodeResult:
        nonlocal runs
        runs += 1
        return FAILED

    assert await world.supervisor.episode(episode) is FAILED
    assert runs == 1
