"""The processes of a run: engine, gateway and trainer. All die with this one."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from titogym.errors import UserError
from titogym.gateway import launch as gateway
from titogym.gateway.engines import launch as engines
from titogym.gateway.engines.control import EngineControl
from titogym.gateway.launch import GatewayProcess
from titogym.processes import Child
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.process import TrainerProcess
from titogym.trainer.config import RunConfig
from titogym.trainer.weights.settings import WeightSettings


@dataclass(frozen=True, slots=True)
class Services:
    """Running and connected to one another: the trainer has joined the engines' weight-update group."""

    trainer: TrainerProcess
    gateway: GatewayProcess
    children: tuple[Child, ...]  # without the trainer, whose end its own next call reports
    eval_gateway: GatewayProcess | None = None  # in front of engines that serve evaluation alone

    def check_health(self) -> None:
        """Raises `UserError` when one of them has died."""
        for child in self.children:
            if not child.alive():
                raise UserError(
                    f"The {child.name} stopped with status {child.process.returncode}; the run can be "
                    f"continued with --resume. The end of {child.log}:\n{child.log_tail()}"
                )
        if not self.trainer.alive():
            raise UserError("The trainer process stopped; the run can be continued with --resume.")


@contextmanager
def running(
    config: RunConfig, logs: Path, checkpoint: Path | None, report: Callable[[str], None]
) -> Iterator[Services]:
    """Start everything, with the trainer's state from `checkpoint` if there is one; stop it all at the end.

    Call from the main thread. `report` hears what takes long. Raises `UserError` when something does not
    start; what had started is stopped again.
    """
    with ExitStack() as stack:
        trainer = TrainerProcess(_backend_spec(config), logs / "trainer.log")
        stack.callback(trainer.close)
        children = []
        # The trainer loads its model on another thread while the engine starts: both take long.
        with ThreadPoolExecutor(1) as loading:
            loaded = loading.submit(_load, trainer, config.model.dir, checkpoint)
            try:
                urls, eval_urls = config.engine.urls, config.eval.urls if config.eval else []
                for key, url in [("engine", url) for url in urls] + [("eval", url) for url in eval_urls]:
                    if not engines.answers(url):
                        raise UserError(f"No engine answers at {url}: start it, or correct {key}.urls.")
                if not urls:
                    report("Starting the engine and the trainer")
                    engine = engines.launch(
                        _engine_options(config),
                        logs / "engine.log",
                        timeout=config.engine.start_timeout,
                        report=report,
                    )
                    stack.callback(engine.stop)
                    children.append(engine.child)
                    urls = [engine.url]
                if config.trainer.r3:
                    _check_routes(urls)
                loaded.result()
            except BaseException:
                trainer.close()  # else leaving the pool would wait for the model
                raise
        report("Starting the gateway")
        served = [_start_gateway(config, urls, logs)]
        stack.callback(served[0].stop)
        if eval_urls:
            served.append(_start_gateway(config, eval_urls, logs / "eval"))
            stack.callback(served[1].stop)
        children += [one.child for one in served]
        trainer.connect_engines(urls, _weight_settings(config))
        if config.weights.check:
            report("Checking that every weight arrives in the engines")
            if not trainer.check_weight_update()["publish/tensors_checked"]:
                report("Not checked: an engine spreads its weights over several ranks")
        yield Services(trainer, served[0], tuple(children), served[1] if eval_urls else None)


def _check_routes(urls: Sequence[str]) -> None:
    for url in urls:
        engine = EngineControl(url)
        with closing(engine):
            if not engine.info().expert_routes:
                raise UserError(
                    f"trainer.r3 replays expert routes, and the engine at {url} returns none: start it with "
                    "--enable-return-routed-experts, or set trainer.r3 to false."
                )


def _start_gateway(config: RunConfig, urls: Sequence[str], logs: Path) -> GatewayProcess:
    logs.mkdir(parents=True, exist_ok=True)
    return gateway.launch(
        urls,
        config.model.dir,
        directory=logs,
        family=config.model.family,
        options=_gateway_options(config),
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
        extra=tuple(settings.extra),
    )


def _gateway_options(config: RunConfig) -> list[str]:
    limit = config.engine.context_length
    return ["--context-length", str(limit)] if limit is not None else []
