"""A run on Ray actors of one machine, each of which is killed."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest
from rich.console import Console

from tests.trainer import drive
from tests.trainer.whole_run import left_behind, write_config
from titogym.errors import UserError
from titogym.harnesses.registry import harness
from titogym.trainer import training
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.process import TrainerError
from titogym.trainer.cluster.base import GatewayOptions
from titogym.trainer.cluster.ray import OnRay, TrainerActor
from titogym.trainer.config.file import load_config
from titogym.trainer.config.sections import RunConfig
from titogym.trainer.episodes import Gateways

pytestmark = [pytest.mark.train, pytest.mark.sandbox, pytest.mark.timeout(280)]


@pytest.fixture
def config(directory, model_dir, engine) -> RunConfig:
    path = write_config(directory, model_dir, engine, steps=2)
    return load_config(path, ["cluster.kind=ray", "cluster.max_restarts=1"])


@pytest.fixture
def cluster(config):
    made = OnRay(config)
    yield made
    made.close()


def wait_for(found: Callable[[], Any], seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def actor_process(kind: str) -> psutil.Process:
    """The process of the one actor of a class."""

    def look() -> list[psutil.Process]:
        everything = psutil.process_iter(["cmdline"])
        return [
            one for one in everything if any(f"ray::{kind}" in word for word in one.info["cmdline"] or [])
        ]

    process: psutil.Process = wait_for(look)[0]
    return process


def test_actors_that_die_take_their_process_along_and_are_replaced(
    cluster, config, engine, model_dir, directory
):
    gateway = cluster.gateway(GatewayOptions([engine.url], model_dir, directory))
    assert gateway.alive()
    key = {"authorization": f"Bearer {gateway.admin_key}"}
    session = httpx.post(f"{gateway.url}/sessions", headers=key, json={}).json()["id"]

    trainer = cluster.trainer(BackendSpec(threads=1), directory / "trainer.log", print)
    trainer.load_hf(model_dir)
    assert trainer.step() == 0
    with pytest.raises(UserError, match=r"config\.json"):
        trainer.load_hf(directory)

    async def rollouts() -> None:
        address = (gateway.url, gateway.admin_key)
        made = harness(config.harness.name)
        async with cluster.episodes(config, made, Gateways(address, address)) as episodes:
            engine.token_latency = 0.01
            tasks = drive.tasks("train", 0, 4)
            running = [asyncio.create_task(episodes.train(task, {"member": task.id})) for task in tasks]
            await asyncio.to_thread(wait_for, lambda: engine.requests)
            await asyncio.to_thread(lambda: actor_process("EpisodesActor").kill())
            results = await asyncio.gather(*running)
            assert [result.task_id for result in results] == [task.id for task in tasks]
            assert all(result.usable for result in results)

    asyncio.run(rollouts())

    actor_process("ServerActor").kill()
    wait_for(lambda: not gateway.alive())
    assert "died" in gateway.ending()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{gateway.url}/health")
    again = cluster.gateway(GatewayOptions([engine.url], model_dir, directory), gateway)
    assert (again.url, again.admin_key) == (gateway.url, gateway.admin_key)
    listed = httpx.get(f"{again.url}/sessions", headers=key).json()["sessions"]
    assert session in [one["id"] for one in listed]

    actor_process("TrainerActor").kill()
    with pytest.raises(TrainerError, match="actor died"):
        trainer.step()
    assert not trainer.alive()
    again.stop()
    trainer.close()
    assert left_behind(directory) == []


class VersionOnlyActor(TrainerActor):
    def __init__(self, spec, log):
        self._trainer = drive.VersionOnlyTrainer(spec, log)


class VersionOnlyCluster(OnRay):
    trainer_actor = VersionOnlyActor


def test_a_whole_run_on_ray(config, directory, monkeypatch):
    monkeypatch.setattr(training, "cluster", VersionOnlyCluster)
    with (directory / "out.txt").open("w") as out:
        run = training.run_training(config, Console(file=out, width=160))
    assert [record["step"] for record in run.metrics()] == [1, 2]
    assert all(record["rollout/failed"] == 0 for record in run.metrics())
    assert left_behind(directory) == []


def test_a_cluster_without_room_says_what_is_missing(config):
    many = replace_engine(config, urls=[], count=10**4)
    with pytest.raises(UserError, match=r"no room for 10001 bundles.*engine\.count"):
        OnRay(many)


def replace_engine(config: RunConfig, **changes) -> RunConfig:
    return config.model_copy(update={"engine": config.engine.model_copy(update=changes)})


def test_no_cluster_at_the_address(config):
    away = config.cluster.model_copy(update={"address": "127.0.0.1:9"})
    with pytest.raises(UserError, match="No Ray cluster could be joined"):
        OnRay(config.model_copy(update={"cluster": away}))
