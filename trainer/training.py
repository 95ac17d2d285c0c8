"""A whole training run, from a configuration to a report."""

import asyncio
import errno
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from titogym import dotted
from titogym.envs import registry
from titogym.envs.task import Limits, Task
from titogym.errors import UserError
from titogym.gateway.engines.environment import default_device
from titogym.gateway.routes import route_shape
from titogym.harnesses.base import Harness
from titogym.harnesses.registry import harness
from titogym.templates.published import read_json
from titogym.templates.registry import resolve
from titogym.templates.tokenizer import Tokenizer
from titogym.trainer import on_policy, services
from titogym.trainer.backends.process import TrainerError, TrainerGone
from titogym.trainer.cluster import cluster
from titogym.trainer.config.sections import RolloutSection, RunConfig
from titogym.trainer.drivers import DRIVERS
from titogym.trainer.drivers.parts import Parts
from titogym.trainer.episodes import Gateways
from titogym.trainer.evaluation import DedicatedEngines
from titogym.trainer.learning.advantages import estimator
from titogym.trainer.pages.live import serving
from titogym.trainer.pages.report import write_html
from titogym.trainer.rollout.buffer import BufferSettings
from titogym.trainer.runs.directory import RunDirectory
from titogym.trainer.runs.progress import Progress
from titogym.trainer.runs.trackers import trackers

log = logging.getLogger(__name__)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def run_training(config: RunConfig, console: Console, *, resume: bool = False) -> RunDirectory:
    """Run `config` to its end in its run directory, showing progress on `console`.

    With `resume`, from the last checkpoint there. A trainer that dies is replaced by one that goes on from
    there, `cluster.max_restarts` times. Call from the main thread. Raises `UserError` when the
    run cannot start or go on, `KeyboardInterrupt` or `asyncio.CancelledError` when it was stopped by
    SIGINT or SIGTERM. No process and no sandbox is left on any way out.
    """
    prepared = prepare(config)  # what can be wrong without any process running is found first
    run = (RunDirectory.reopen if resume else RunDirectory.create)(config.run.dir, config)
    progress = Progress(console)
    if resume:
        last = run.last_step()
        progress.note(
            f"Continuing from step {last}" if last else "There is no checkpoint yet: starting again"
        )
    try:
        with (
            _explained(run),
            _logging_to(run.logs / "driver.log"),
            asyncio.Runner() as runner,
            _live_page(config, run, progress),
            services.running(config, cluster(config), run.logs, run.last_checkpoint(), progress.note) as up,
            progress.running(),
        ):
            restarts = 0
            while True:
                try:
                    if restarts:
                        up.trainer.close()  # then no call of it goes on that could still write a checkpoint
                        run.rewind()
                        up.restart_trainer(run.last_checkpoint())
                        progress.note(f"Replaced the trainer: continuing from step {run.last_step()}")
                    runner.run(_train(config, prepared, up, run, progress))
                    break
                except TrainerGone as error:
                    if restarts == config.cluster.max_restarts:
                        raise
                    restarts += 1
                    log.warning("%s", error)
    except TrainerError as error:
        raise UserError(f"{error}\nThe run can be continued with --resume.") from error
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise UserError(
            f"Could not write to {error.filename or run.path}: {os.strerror(error.errno)}. Make room, then "
            "continue the run with --resume."
        ) from error
    finally:
        run.release()
    return run


@contextmanager
def _explained(run: RunDirectory) -> Iterator[None]:
    """A run that is stopped leaves a report of what it came to, as one that ends well does."""
    try:
        yield
    except BaseException:
        try:
            if run.metrics():
                write_html(run)
        except Exception:  # which would hide why the run was stopped
            log.exception("no report of the run that was stopped")
        raise


@contextmanager
def _live_page(config: RunConfig, run: RunDirectory, progress: Progress) -> Iterator[None]:
    if config.tracking.port is None:
        yield
        return
    with serving(run, config.tracking.port) as url:
        progress.note(f"Watch this run at {url}")
        yield


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """titogym's own log lines go to a file while the block runs: the terminal belongs to the progress."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("titogym")
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)
        handler.close()


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the configuration names, found."""

    tasks: Sequence[Task]
    eval_tasks: Sequence[Task]
    harness: Harness
    tokenizer: Tokenizer


def prepare(config: RunConfig) -> Prepared:
    """Everything that is found by name or read from disk. Raises `UserError` where it is not there."""
    tokenizer = Tokenizer.load(config.model.dir)
    resolve(config.model.dir, config.model.family)
    if config.trainer.true_on_policy:
        on_policy.check(
            read_json(config.model.dir / "config.json"),
            backend=config.trainer.backend,
            dtype=config.trainer.dtype,
            device=default_device(),
        )
    if config.trainer.r3 and route_shape(config.model.dir) is None:
        raise UserError("trainer.r3 replays the experts of mixture-of-experts models: set it to false.")
    _find_functions(config)
    training, evaluation = config.environment, config.eval
    tasks = registry.tasks(training.source, split=training.split, seed=training.seed, count=training.count)
    eval_tasks: list[Task] = []
    if evaluation is not None:
        source = evaluation.source or training.source
        eval_tasks = registry.tasks(
            source, split=evaluation.split, seed=evaluation.seed, count=evaluation.count
        )
        if both := {task.id for task in tasks} & {task.id for task in eval_tasks}:
            raise UserError(
                f"{len(both)} held-out tasks are among those that training sees ({min(both)}, ...): choose "
                "another eval.source, eval.split or eval.seed."
            )
    return Prepared(
        tasks=[_limited(task, config.rollout) for task in tasks],
        eval_tasks=[_limited(task, config.rollout) for task in eval_tasks],
        harness=harness(config.harness.name, **config.harness.options),
        tokenizer=tokenizer,
    )


def _find_functions(config: RunConfig) -> None:
    """The user's own functions and classes. Raises `UserError` for one that is not found."""
    estimator(config.algorithm.advantage)
    BufferSettings.of(config)
    dotted.load(config.buffer.implementation, "buffer.implementation")
    if config.algorithm.loss != "clipped":
        dotted.load(config.algorithm.loss, "algorithm.loss")


def _limited(task: Task, rollout: RolloutSection) -> Task:
    """`task` under the stricter of its own limits and those of the run."""
    own: Limits = task.limits
    turns = min(own.turns, rollout.max_turns or own.turns)
    seconds = min(own.agent_seconds, rollout.max_seconds or own.agent_seconds)
    tokens = min((limit for limit in (own.tokens, rollout.max_tokens) if limit is not None), default=None)
    return replace(task, limits=replace(own, turns=turns, tokens=tokens, agent_seconds=seconds))


async def _train(
    config: RunConfig, prepared: Prepared, up: services.Services, run: RunDirectory, progress: Progress
) -> None:
    task = asyncio.current_task()
    assert task is not None
    # SIGTERM stops the run as cleanly as SIGINT does.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with _parts(config, prepared, up) as parts:
        try:
            await DRIVERS[config.run.driver](config, parts, run, progress).to_the_end()
        except TrainerGone:
            if task.cancelling():  # whoever stops the run may have stopped its trainer too
                raise asyncio.CancelledError from None
            raise


@asynccontextmanager
async def _parts(config: RunConfig, prepared: Prepared, up: services.Services) -> AsyncIterator[Parts]:
    """The driver's parts on top of the running services."""
    served = up.eval_gateway or up.gateway
    gateways = Gateways(
        (up.gateway.url, up.gateway.admin_key),
        (served.url, served.admin_key),
    )
    following = trackers(config, config.run.dir, RunDirectory(config.run.dir).last_step())
    try:
        async with up.cluster.episodes(config, prepared.harness, gateways) as episodes:
            watched = up.supervisor.episode
            yield Parts(
                trainer=up.trainer,
                run_episode=lambda task, labels: watched(partial(episodes.train, task, labels)),
                run_eval_episode=lambda task, labels: watched(partial(episodes.evaluate, task, labels)),
                announce=episodes.announce if config.sandbox.warm else None,
                tasks=prepared.tasks,
                eval_tasks=prepared.eval_tasks,
                token_text=lambda token: prepared.tokenizer.decode([token]),
                check_health=up.check_health,
                mend=up.supervisor.mend,
                let_in=up.supervisor.let_in,
                eval_engines=DedicatedEngines(config.eval.urls) if config.eval and config.eval.urls else None,
                trackers=following,
            )
    finally:
        for tracker in following:
            tracker.close()
