"""The processes of a run: engines, gateways and trainer. All die with this one."""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from titogym.errors import UserError
from titogym.gateway.engines import launch as engines
from titogym.gateway.engines.control import EngineControl
from titogym.gateway.engines.launch import EngineOptions
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.process import TrainerGone, TrainerProcess
from titogym.trainer.cluster.base import Cluster, GatewayOptions, Report, Running, RunningGateway
from titogym.trainer.cluster.supervision import Service, Supervisor
from titogym.trainer.config.sections import RunConfig
from titogym.trainer.weights.settings import WeightSettings

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Running)


@dataclass(slots=True)
class Services:
    """Running and connected to one another: the trainer has met the engines."""

    trainer: TrainerProcess
    restart_trainer: Callable[[Path | None], None]  # one that goes on from a checkpoint takes its place
    gateway: RunningGateway
    supervisor: Supervisor
    cluster: Cluster
    eval_gateway: RunningGateway | None = None  # in front of engines that serve evaluation alone

    def check_health(self) -> None:
        """Raises `TrainerGone` when the trainer has died: what it learnt since its checkpoint is lost."""
        if not self.trainer.alive():
            raise TrainerGone(self.trainer.ending())


@contextmanager
def running(
    config: RunConfig, cluster: Cluster, logs: Path, checkpoint: Path | None, report: Report
) -> Iterator[Services]:
    """Start everything, with the trainer's state from `checkpoint` if there is one; stop it all at the end.

    Call from the main thread. `report` hears what takes long. Raises `UserError` when something does not
    start; what had started is stopped again.
    """
    with ExitStack() as stack:
        stack.callback(cluster.close)
        # Processes end with the thread that started them: what is replaced later needs one that stays.
        starter = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="services"))
        trainer = cluster.trainer(_backend_spec(config), logs / "trainer.log", report)
        stack.callback(lambda: trainer.close())  # the one that runs by then
        # The trainer loads its model on another thread while the engines start: both take long.
        with ThreadPoolExecutor(1) as loading:
            loaded = loading.submit(_load, trainer, config.model.dir, checkpoint)
            try:
                _check_given(config)
                own = [] if config.engine.urls else _start_engines(config, cluster, logs, report)
                for service in own:
                    stack.callback(_stop, service)
                urls = [service.running.url for service in own] or config.engine.urls
                if config.trainer.r3:
                    _check_routes(urls)
                loaded.result()
            except BaseException:
                trainer.close()  # else leaving the pool would wait for the model
                raise
        report("Starting the gateway")
        gateways = [_start_gateway(config, cluster, urls, logs)]
        stack.callback(_stop, gateways[0])
        if config.eval and config.eval.urls:
            gateways.append(_start_gateway(config, cluster, config.eval.urls, logs / "eval"))
            stack.callback(_stop, gateways[1])

        def connect() -> None:
            trainer.connect_engines(urls, _weight_settings(config))

        connect()
        if config.weights.check:
            report("Checking that every weight arrives in the engines")
            if not trainer.check_weight_update()["publish/tensors_checked"]:
                report("Not checked: an engine spreads its weights over several ranks")
        supervisor = Supervisor(own, gateways, connect, starter, lambda name: report(f"Replaced the {name}"))

        def restart_trainer(checkpoint: Path | None) -> None:
            nonlocal trainer
            trainer.close()
            trainer = up.trainer = cluster.trainer(_backend_spec(config), logs / "trainer.log", report)
            _load(trainer, config.model.dir, checkpoint)
            try:
                connect()
            except TrainerGone:
                raise
            except UserError as error:
                if not own:
                    raise
                # An engine has died too: the driver's first update replaces it.
                log.warning("%s", error)

        up = Services(
            trainer,
            restart_trainer,
            gateways[0].running,
            supervisor,
            cluster,
            gateways[1].running if len(gateways) > 1 else None,
        )
        yield up


def _stop(service: Service[R]) -> None:
    service.running.stop()  # the one that runs by then


def _check_given(config: RunConfig) -> None:
    given = [("engine", url) for url in config.engine.urls]
    given += [("eval", url) for url in (config.eval.urls if config.eval else [])]
    for key, url in given:
        if not engines.answers(url):
            raise UserError(f"No engine answers at {url}: start it, or correct {key}.urls.")


def _start_engines(config: RunConfig, cluster: Cluster, logs: Path, report: Report) -> list[Service[Running]]:
    """The run's own engines, all at once; when one does not come up, the others are stopped."""
    count = config.engine.count
    report(
        "Starting the engine and the trainer" if count == 1 else f"Starting {count} engines and the trainer"
    )
    options = _engine_options(config)

    def start(number: int, options: EngineOptions) -> Running:
        log = logs / ("engine.log" if count == 1 else f"engine-{number}.log")
        return cluster.engine(number, options, log, config.engine.start_timeout, report)

    def service(number: int, engine: Running) -> Service[Running]:
        again = replace(options, port=urlsplit(engine.url).port or 0)
        name = "engine" if count == 1 else f"engine {number}"
        return Service(name, engine, lambda old: start(number, again), config.cluster.max_restarts)

    started: list[Service[Running]] = []
    try:
        for number in range(count):
            started.append(service(number, start(number, options)))
    except BaseException:
        for one in started:
            one.running.stop()
        raise
    return started


def _check_routes(urls: Sequence[str]) -> None:
    for url in urls:
        engine = EngineControl(url)
        with closing(engine):
            if not engine.info().expert_routes:
                raise UserError(
                    f"trainer.r3 replays expert routes, and the engine at {url} returns none: start it with "
                    "--enable-return-routed-experts, or set trainer.r3 to false."
                )


def _start_gateway(
    config: RunConfig, cluster: Cluster, urls: Sequence[str], logs: Path
) -> Service[RunningGateway]:
    logs.mkdir(parents=True, exist_ok=True)
    options = GatewayOptions(
        urls, config.model.dir, logs, config.model.family, tuple(_gateway_options(config))
    )
    return Service(
        "gateway",
        cluster.gateway(options),
        lambda old: cluster.gateway(options, old),
        config.cluster.max_restarts,
    )


def _load(trainer: TrainerProcess, model_dir: Path, checkpoint: Path | None) -> None:
    trainer.load_hf(model_dir)
    if checkpoint is not None:
        trainer.load(checkpoint / "trainer")


def _backend_spec(config: RunConfig) -> BackendSpec:
    settings = config.trainer
    return BackendSpec(
        backend=settings.backend,
        optimizer=config.optimizer,
        loss=config.algorithm,
        dtype=settings.dtype,
        microbatch_tokens=settings.microbatch_tokens,
        threads=settings.threads,
        layout=settings.layout(),
        recompute=settings.recompute,
        deterministic=settings.deterministic,
        replay_routes=settings.r3,
        true_on_policy=settings.true_on_policy,
        timeout=settings.timeout,
        reference=config.algorithm.needs_reference,
        value_head=config.algorithm.needs_value,
    )


def _weight_settings(config: RunConfig) -> WeightSettings:
    settings = config.weights
    return WeightSettings(
        mover=settings.mover,
        mode=settings.mode,
        bucket_bytes=settings.bucket_mb * 2**20,
        expert_factor=config.trainer.expert_parallel,
        timeout=settings.timeout,
        directory=config.run.dir / "weights",
        model_dir=config.model.dir,
        encoding=settings.encoding,
        rebase_every=settings.rebase_every,
    )


def _engine_options(config: RunConfig) -> engines.EngineOptions:
    settings = config.engine
    return engines.EngineOptions(
        model=str(config.model.dir),
        dtype=settings.dtype,
        context_length=settings.context_length,
        max_total_tokens=settings.max_total_tokens,
        memory_fraction=settings.memory_fraction,
        tensor_parallel=settings.tensor_parallel,
        threads=settings.threads,
        seed=config.run.seed,
        expert_routes=config.trainer.r3,
        exact=config.trainer.true_on_policy,
        extra=tuple(settings.extra),
    )


def _gateway_options(config: RunConfig) -> list[str]:
    limit = config.engine.context_length
    return ["--context-length", str(limit)] if limit is not None else []
