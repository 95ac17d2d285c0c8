"""What a run works with: the trainer, the episodes, the tasks, and whoever wants to hear of it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from titogym.envs.task import Task
from titogym.trainer.batch import TrainBatch
from titogym.trainer.evaluation import EvalEngines
from titogym.trainer.rollout.worker import Announce, RunEpisode
from titogym.trainer.runs.trackers import Tracker


class Trainer(Protocol):
    """The process that holds the weights in training. Every call blocks; one call at a time."""

    def logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]: ...

    def reference_logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]: ...

    def values(self, batch: TrainBatch) -> list[NDArray[np.float32]]: ...

    def train_step(self, batch: TrainBatch) -> dict[str, float]: ...

    def publish_weights(self, version: int) -> dict[str, float]:
        """Install the current weights in every engine as `version`."""
        ...

    def save(self, path: Path) -> None: ...

    def save_hf(self, model_dir: Path) -> None: ...


async def _nothing_to_mend() -> bool:
    return False


async def _nobody_to_let_in() -> None:
    return


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run works with, ready for use.

    `run_episode` samples as training does, `run_eval_episode` as evaluation does. `token_text` shows one
    token id. `check_health` raises `UserError` when a process that cannot be replaced has died; `mend`
    replaces others, and says whether engines wait for the weights to be published, after which `let_in`
    gives them requests again.
    `announce` hears of the episodes that `run_episode` will be asked for next, where it can make use of it.
    `eval_engines` are those that serve evaluation alone, where there are such.
    """

    trainer: Trainer
    run_episode: RunEpisode
    run_eval_episode: RunEpisode
    tasks: Sequence[Task]
    eval_tasks: Sequence[Task]
    token_text: Callable[[int], str]
    announce: Announce | None = None
    check_health: Callable[[], None] = lambda: None
    mend: Callable[[], Awaitable[bool]] = _nothing_to_mend
    let_in: Callable[[], Awaitable[None]] = _nobody_to_let_in
    eval_engines: EvalEngines | None = None
    trackers: Sequence[Tracker] = ()
