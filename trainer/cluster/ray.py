"""A run over a Ray cluster: an actor for each engine, each gateway and the trainer, several for the episodes.

An actor does not compute; it starts on its node the very process that `local` would start here, and that
process ends with it. So whatever kills an actor is noticed and replaced as a dead process is.

Placement (`engine.placement`): `disaggregated` gives the trainer and every engine a bundle of their own;
`colocated` puts engines and trainer on the same devices of one node, each with a share of them. All ranks
of a trainer are on one node. Files that the run names (model, run directory, tasks) must be the same on
every node: a shared file system, or one machine.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from titogym.envs.task import Task
from titogym.errors import UserError, install_extra
from titogym.gateway import launch as gateways
from titogym.gateway.engines import launch as engines
from titogym.gateway.engines.launch import EngineOptions
from titogym.gateway.launch import Address, GatewayProcess
from titogym.harnesses.base import Harness
from titogym.harnesses.episode import EpisodeResult
from titogym.harnesses.registry import harness as make_harness
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.process import TrainerGone, TrainerProcess
from titogym.trainer.cluster.base import GatewayOptions, Report, Running, RunningGateway, RunsEpisodes
from titogym.trainer.config.sections import RunConfig
from titogym.trainer.episodes import Episodes, Gateways, episodes

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError:
    raise UserError(f'cluster.kind = "ray" needs Ray: {install_extra("ray")}') from None

_GRACE = 10.0  # seconds for a server to end by itself
_PATIENCE = 60.0  # seconds for a busy cluster to make room
_CONCURRENT = 1000  # calls of one rollout actor at once: more than any run has in flight


class ServerActor:
    """On its node: one engine or one gateway, which ends with this actor."""

    def __init__(self) -> None:
        self._server: engines.EngineProcess | GatewayProcess | None = None

    def host(self) -> str:
        """The address of this node for others; loopback where there are no others."""
        return "127.0.0.1" if len(ray.nodes()) == 1 else str(ray.util.get_node_ip_address())

    def engine(self, options: EngineOptions, log: Path, timeout: float) -> str:
        self._server = engines.launch(replace(options, host=self.host()), log, timeout=timeout)
        return self._server.url

    def gateway(self, options: GatewayOptions, replacing: Address | None) -> Address:
        self._server = gateways.launch(
            options.engines,
            options.model_dir,
            directory=options.directory,
            family=options.family,
            options=[*options.options, "--host", self.host()],
            replacing=replacing,
        )
        return self._server.address

    def ended(self) -> str | None:
        """How the server ended; None while it runs."""
        assert self._server is not None
        return None if self._server.alive() else self._server.ending()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()


class TrainerActor:
    """On its node: the trainer, as a process of its own, which ends with this actor."""

    def __init__(self, spec: BackendSpec, log: Path) -> None:
        self._trainer = TrainerProcess(spec, log)

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self._trainer, method)(*arguments)


class EpisodesActor:
    """On its node: the harness and the sandboxes of many episodes at once."""

    def __init__(self, config: RunConfig, gateways: Gateways) -> None:
        self._config, self._gateways = config, gateways
        self._stack = AsyncExitStack()
        self._episodes: Episodes | None = None

    async def prepare(self) -> None:
        settings = self._config.harness
        harness = make_harness(settings.name, **settings.options)
        self._episodes = await self._stack.enter_async_context(
            episodes(self._config, harness, self._gateways)
        )

    async def run(
        self, kind: Literal["train", "evaluate"], task: Task, labels: Mapping[str, str]
    ) -> EpisodeResult:
        assert self._episodes is not None
        run = self._episodes.train if kind == "train" else self._episodes.evaluate
        return await run(task, labels)

    async def close(self) -> None:
        await self._stack.aclose()


class RayServer:
    """A `Running` server behind a `ServerActor`. `alive` only looks at the answer to an earlier question."""

    def __init__(self, name: str, actor: Any, url: str, admin_key: str = "") -> None:
        self.url, self.admin_key = url, admin_key
        self._name, self._actor = name, actor
        self._question = actor.ended.remote()
        self._ending: str | None = None

    def alive(self) -> bool:
        if self._ending is None and ray.wait([self._question], timeout=0)[0]:
            try:
                self._ending = ray.get(self._question)
            except RayActorError as error:
                self._ending = f"{self._name}'s actor died: {_first_line(error)}"
            if self._ending is None:
                self._question = self._actor.ended.remote()
        return self._ending is None

    def ending(self) -> str:
        return self._ending or f"{self._name} runs"

    def stop(self) -> None:
        with suppress(RayActorError, GetTimeoutError):
            ray.get(self._actor.stop.remote(), timeout=_GRACE)
        ray.kill(self._actor)


class RayTrainer:
    """Mirrors `TrainerProcess`, whose methods it passes on; they block, and raise as they do there."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._gone: str | None = None

    def alive(self) -> bool:
        return self._gone is None

    def ending(self) -> str:
        return self._gone or "The trainer runs."

    def close(self) -> None:
        """End it, whatever it is doing."""
        ray.kill(self._actor)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_") or not hasattr(TrainerProcess, method):
            raise AttributeError(method)
        return lambda *arguments: self._ask(method, arguments)

    def _ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return ray.get(self._actor.call.remote(method, arguments))
        except RayActorError as error:
            self._gone = f"The trainer's actor died: {_first_line(error)}"
            raise TrainerGone(self._gone) from None
        except RayTaskError as error:
            raise error.cause from None


@dataclass(slots=True)
class _Worker:
    """One rollout actor: how many episodes it runs, and how often it may still be replaced."""

    number: int
    actor: Any
    restarts: int
    running: int = 0


class RayEpisodes:
    """Gives each episode to the rollout actor with the fewest; runs it again when that actor dies."""

    def __init__(self, config: RunConfig, start: Callable[[], Any]) -> None:
        self._start = start
        self._workers = [
            _Worker(number, None, config.cluster.max_restarts)
            for number in range(config.cluster.rollout_workers)
        ]
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        await asyncio.gather(*(self._begin(worker) for worker in self._workers))

    async def train(self, task: Task, labels: Mapping[str, str]) -> EpisodeResult:
        return await self._run("train", task, labels)

    async def evaluate(self, task: Task, labels: Mapping[str, str]) -> EpisodeResult:
        return await self._run("evaluate", task, labels)

    def announce(self, task: Task, labels: Mapping[str, str]) -> None:
        """Nothing is made ready: which machine an episode runs on is known when it starts."""

    async def close(self) -> None:
        for worker in self._workers:
            if worker.actor is not None:
                with suppress(RayActorError):
                    await worker.actor.close.remote()
                ray.kill(worker.actor)

    async def _run(self, kind: str, task: Task, labels: Mapping[str, str]) -> EpisodeResult:
        while True:
            worker = min(self._workers, key=lambda one: one.running)
            actor = worker.actor
            worker.running += 1
            asked = actor.run.remote(kind, task, labels)
            try:
                result: EpisodeResult = await asked
                return result
            except asyncio.CancelledError:
                ray.cancel(asked)
                with suppress(Exception):  # it has cleaned up when the cancelled call has ended
                    await asyncio.shield(asyncio.wrap_future(asked.future()))
                raise
            except RayActorError as error:
                await self._replace(worker, actor, error)
            finally:
                worker.running -= 1

    async def _replace(self, worker: _Worker, dead: Any, error: RayActorError) -> None:
        async with self._starting:
            if worker.actor is not dead:
                return  # another episode of it has seen to that
            _spend_restart(worker, error)
            await self._begin(worker)

    async def _begin(self, worker: _Worker) -> None:
        """Give it an actor, once that is ready for episodes."""
        while True:
            actor = self._start()
            try:
                await actor.prepare.remote()
            except RayTaskError as error:
                raise error.cause from None
            except RayActorError as error:  # it has died while it was starting
                _spend_restart(worker, error)
                continue
            worker.actor = actor
            return


def _spend_restart(worker: _Worker, error: RayActorError) -> None:
    if worker.restarts == 0:
        raise UserError(
            f"Rollout worker {worker.number} died ({_first_line(error)}), as often as cluster.max_restarts "
            "allows; the run can be continued with --resume."
        ) from None
    worker.restarts -= 1


class OnRay:
    """A `Cluster` of Ray actors. Joins the cluster at `config.cluster.address`, or starts one here."""

    trainer_actor = TrainerActor

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            _meet(config.cluster.address)
            ray.init(
                address=config.cluster.address,
                include_dashboard=False,
                log_to_driver=False,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"No Ray cluster could be joined or started: {_first_line(error)}") from None
        try:
            self._group = self._reserve()
        except BaseException:
            ray.shutdown()
            raise

    def engine(
        self, number: int, options: EngineOptions, log: Path, timeout: float, report: Report
    ) -> Running:
        actor = self._actor(ServerActor, self._bundle_of_engine(number), self._engine_gpus()).remote()
        url = _get(actor.engine.remote(options, log.absolute(), timeout))
        return RayServer(f"engine {number}", actor, url)

    def gateway(self, options: GatewayOptions, replacing: RunningGateway | None = None) -> RunningGateway:
        actor = self._actor(ServerActor, 0, 0).remote()
        here = replace(options, directory=options.directory.absolute())
        old = replacing and Address(replacing.url, replacing.admin_key)
        address = _get(actor.gateway.remote(here, old))
        return RayServer("gateway", actor, address.url, address.admin_key)

    def trainer(self, spec: BackendSpec, log: Path, report: Report) -> TrainerProcess:
        gpus = spec.layout.world if self._has_gpus() else 0
        share = gpus / 2 if self._config.engine.placement == "colocated" else gpus
        actor = self._actor(self.trainer_actor, 0, share).remote(spec, log.absolute())
        return cast(TrainerProcess, RayTrainer(actor))

    def episodes(
        self, config: RunConfig, harness: Harness, gateways: Gateways
    ) -> AbstractAsyncContextManager[RunsEpisodes]:
        return self._episodes(config, gateways)

    @asynccontextmanager
    async def _episodes(self, config: RunConfig, gateways: Gateways) -> AsyncIterator[RunsEpisodes]:
        def start() -> Any:
            actor = ray.remote(num_cpus=0, max_concurrency=_CONCURRENT)(EpisodesActor)
            return actor.options(scheduling_strategy="SPREAD").remote(config, gateways)

        running = RayEpisodes(config, start)
        try:
            await running.start()
            yield running
        finally:
            await running.close()

    def close(self) -> None:
        remove_placement_group(self._group)
        ray.shutdown()

    def _reserve(self) -> Any:
        """A bundle for the trainer (with the gateway) and, unless they share it, one for each engine."""
        gpus = self._has_gpus()
        trainer: dict[str, float] = {"CPU": 1}
        if gpus:
            trainer["GPU"] = self._config.trainer.layout().world
        bundles = [trainer]
        if self._config.engine.placement == "disaggregated" and not self._config.engine.urls:
            engine = {"CPU": 1.0} | ({"GPU": float(self._config.engine.tensor_parallel)} if gpus else {})
            bundles += [engine] * self._config.engine.count
        if not gpus:  # processes share the cores of a small machine
            bundles = [{"CPU": 0.1} for _ in bundles]
        there = ray.cluster_resources()
        for kind in ("GPU", "CPU"):
            wanted = sum(bundle.get(kind, 0.0) for bundle in bundles)
            if wanted > there.get(kind, 0.0):
                raise UserError(
                    f"The Ray cluster has no room for {len(bundles)} bundles with {wanted:.0f} {kind}s: "
                    f"it has {there.get(kind, 0.0):.0f}. Lower trainer.*_parallel or engine.count."
                )
        group = placement_group(bundles, strategy="PACK")
        if not group.wait(_PATIENCE):
            remove_placement_group(group)
            raise UserError(
                f"The Ray cluster has not made room for {len(bundles)} bundles in {_PATIENCE:.0f} s: other "
                "work holds its devices, or no node has enough of them for the trainer."
            )
        return group

    def _bundle_of_engine(self, number: int) -> int:
        return 0 if self._config.engine.placement == "colocated" else 1 + number

    def _engine_gpus(self) -> float:
        if not self._has_gpus():
            return 0
        gpus = float(self._config.engine.tensor_parallel)
        return gpus / 2 if self._config.engine.placement == "colocated" else gpus

    def _has_gpus(self) -> bool:
        return bool(ray.cluster_resources().get("GPU", 0))

    def _actor(self, kind: type, bundle: int, gpus: float) -> Any:
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return ray.remote(num_cpus=0, num_gpus=gpus)(kind).options(scheduling_strategy=place)


def _meet(address: str | None) -> None:
    """Raises `OSError` when nobody listens at HOST:PORT; Ray would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.rpartition("/")[2], int(port)), timeout=10.0).close()


def _get(asked: Any) -> Any:
    """The result of an actor's call; its own exception where it raised one."""
    try:
        return ray.get(asked)
    except RayTaskError as error:
        raise error.cause from None
    except RayActorError as error:
        raise UserError(f"An actor died while it started: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
