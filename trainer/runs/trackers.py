"""The figures of a run for other programs: TensorBoard, W&B (offline) and Prometheus.

One naming scheme: a figure has the same name everywhere, such as `reward/mean`. Prometheus, which knows no
slash, has `titogym_reward_mean`. The figures of a step are logged at that step, and a held-out score at the
step of the weights that earned it, however late it came: `eval/score`.
"""

import math
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from titogym.errors import UserError, install_extra
from titogym.trainer.config.sections import RunConfig
from titogym.trainer.evaluation import Evaluation

_NOT_PROMETHEUS = re.compile(r"[^a-zA-Z0-9_]")


class Tracker(Protocol):
    """Hears of every step and evaluation."""

    def step(self, record: Mapping[str, Any]) -> None: ...

    def evaluation(self, evaluation: Evaluation) -> None: ...

    def close(self) -> None: ...


def figures(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The named figures of a step's record that are finite numbers."""
    for name, value in record.items():
        if "/" in name and isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)


def prometheus_name(name: str) -> str:
    """`reward/mean` -> `titogym_reward_mean`."""
    return "titogym_" + _NOT_PROMETHEUS.sub("_", name)


def prometheus_text(record: Mapping[str, Any] | None, meanings: Mapping[str, str]) -> str:
    """The last step's figures in Prometheus' text format; `titogym_step` alone before the first."""
    lines = ["# TYPE titogym_step gauge", f"titogym_step {0 if record is None else record['step']}"]
    for name, value in sorted(figures(record or {})):
        known = prometheus_name(name)
        if meaning := meanings.get(name):
            lines.append(f"# HELP {known} {meaning}")
        lines += [f"# TYPE {known} gauge", f"{known} {value!r}"]
    return "\n".join(lines) + "\n"


class TensorBoardTracker:
    """Writes event files to `directory`, without TensorFlow or torch.

    TensorBoard is told to forget what an earlier process wrote of steps after `resumed`, which come again.
    """

    def __init__(self, directory: Path, resumed: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory))
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(step=resumed + 1, wall_time=time.time(), session_log=start))

    def step(self, record: Mapping[str, Any]) -> None:
        self._write(record["step"], record["time"], dict(figures(record)))

    def evaluation(self, evaluation: Evaluation) -> None:
        if evaluation.score is not None:
            self._write(evaluation.version, time.time(), {"eval/score": evaluation.score})

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, wall_time: float, values: Mapping[str, float]) -> None:
        summary = self._summary(
            value=[self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._writer.add_event(self._event(step=step, wall_time=wall_time, summary=summary))
        self._writer.flush()


class WandbTracker:
    """Writes an offline run; W&B's own `wandb sync` sends it where the user wants it.

    A run that goes on from step `resumed` writes another part under the same id.
    """

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any], resumed: int = 0) -> None:
        import wandb

        self._run = wandb.init(
            project=project,
            name=directory.name,
            id=str(uuid.uuid5(uuid.NAMESPACE_URL, str(directory.resolve()))),
            dir=str(directory),
            config=dict(config),
            mode="offline",
            settings=wandb.Settings(console="off", silent=True),
        )
        # Scores may come late: they have an axis of their own, since W&B's steps only go up. A step of W&B
        # holds one; logged without a step, each would use one up.
        self._run.define_metric("eval/*", step_metric="eval/version")
        self._step, self._has_score = resumed, False
        self._scores: deque[dict[str, float]] = deque()  # that wait for a step

    def step(self, record: Mapping[str, Any]) -> None:
        self._step, self._has_score = record["step"], False
        self._run.log(dict(figures(record)), step=self._step)
        self._log_score()

    def evaluation(self, evaluation: Evaluation) -> None:
        if evaluation.score is not None:
            self._scores.append({"eval/score": evaluation.score, "eval/version": evaluation.version})
            self._log_score()

    def close(self) -> None:
        while self._scores:
            self._step, self._has_score = self._step + 1, False
            self._log_score()
        self._run.finish()

    def _log_score(self) -> None:
        if self._scores and not self._has_score:
            self._run.log(self._scores.popleft(), step=self._step)
            self._has_score = True


def trackers(config: RunConfig, directory: Path, resumed: int = 0) -> list[Tracker]:
    """Those that `config.tracking` asks for, of a run that goes on from step `resumed`.

    Raises `UserError` when their package is not installed.
    """
    wanted: dict[str, tuple[bool, Callable[[], Tracker]]] = {
        "tensorboard": (
            config.tracking.tensorboard,
            lambda: TensorBoardTracker(directory / "tensorboard", resumed),
        ),
        "wandb": (
            config.tracking.wandb,
            lambda: WandbTracker(
                directory, config.tracking.wandb_project, config.model_dump(mode="json"), resumed
            ),
        ),
    }
    made: list[Tracker] = []
    for name, (asked, make) in wanted.items():
        try:
            made += [make()] if asked else []
        except ModuleNotFoundError as error:
            raise UserError(
                f"tracking.{name} needs the package {error.name}: install it with "
                f"{install_extra('tracking')}, or set it to false."
            ) from None
    return made
