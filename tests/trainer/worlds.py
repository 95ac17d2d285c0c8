"""A small deterministic world for the driver: episodes and a trainer that live in memory.

The agent answers with one of `ACTIONS` tokens, drawn from softmax(logits) of the weights that the engine
holds; the reward is 1 for the last action. The trainer does real policy-gradient steps on the logits, so
that a driver that mixes up versions, groups or advantages does not learn.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from titogym.envs.task import Task
from titogym.gateway.trajectories import Trajectory
from titogym.harnesses.episode import EpisodeResult
from titogym.trainer.batch import TrainBatch

ACTIONS = 4
PROMPT = [90, 91, 92]


def tasks(count: int, split: str = "train") -> list[Task]:
    return [Task(f"{split}-{i}", "do it") for i in range(count)]


def episode(
    task: Task,
    action: int,
    logprob: float = -1.0,
    *,
    version: str = "0",
    trajectories: int = 1,
    reward: float | None = None,
) -> EpisodeResult:
    """A finished episode of one turn that sampled `action` twice."""
    tokens = [*PROMPT, action, action]
    made = [
        Trajectory(
            session_id="s",
            leaf=str(number),
            tokens=tokens,
            loss_mask=[0, 0, 0, 1, 1],
            logprobs=[0.0, 0.0, 0.0, logprob, logprob],
            version_spans=[(3, 5, version)],
            turns=1,
            finish_reason="stop",
        )
        for number in range(trajectories)
    ]
    value = float(action == ACTIONS - 1) if reward is None else reward
    return EpisodeResult(
        task.id, "finished", value, trajectories=made, turns=1, seconds={"total": 0.01}, session_id="s"
    )


def failed(task: Task, outcome: str = "engine_error", error: str = "The engine is gone.") -> EpisodeResult:
    return EpisodeResult(task.id, outcome, error=error)  # type: ignore[arg-type]


Floats = NDArray[np.float64]


def softmax(logits: Floats) -> Floats:
    shifted: Floats = np.exp(logits - logits.max())
    shifted /= shifted.sum()
    return shifted


@dataclass
class Engine:
    """What the agents sample from: a copy of published weights."""

    logits: Floats = field(default_factory=lambda: np.zeros(ACTIONS))
    version: str = "default"


@dataclass
class World:
    """One engine, its agents and its trainer. `duration` gives an episode's length in event-loop turns."""

    seed: int = 0
    duration: Callable[[int], int] = lambda number: 1
    break_episode: Callable[[int], EpisodeResult | None] = lambda number: None
    engine: Engine = field(default_factory=Engine)
    started: int = 0
    ended: int = 0
    running: int = 0
    most_running: int = 0
    labels: list[Mapping[str, str]] = field(default_factory=list)

    async def run_episode(self, task: Task, labels: Mapping[str, str]) -> EpisodeResult:
        number, self.started = self.started, self.started + 1
        self.labels.append(labels)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            logits, version = self.engine.logits, self.engine.version
            await asyncio.sleep(0)
            for _ in range(self.duration(number)):
                await asyncio.sleep(0.0005)
            if (broken := self.break_episode(number)) is not None:
                return broken
            chances = softmax(logits)
            action = random.Random(f"{self.seed}/{number}").choices(range(ACTIONS), chances.tolist())[0]
            return episode(task, action, float(np.log(chances[action])), version=version)
        finally:
            self.running -= 1
            self.ended += 1

    async def run_eval_episode(self, task: Task, labels: Mapping[str, str]) -> EpisodeResult:
        await asyncio.sleep(0)
        return episode(
            task,
            ACTIONS - 1,
            version=self.engine.version,
            reward=float(softmax(self.engine.logits)[ACTIONS - 1]),
        )


class MemoryTrainer:
    """REINFORCE on the logits of a bandit, with the interface of the trainer process.

    `on_call` hears each call before it does anything, and may raise in its place.
    """

    def __init__(self, world: World, lr: float = 0.5) -> None:
        self.world = world
        self.lr = lr
        self.logits: Floats = np.zeros(ACTIONS)
        self.on_call: Callable[[str], None] = lambda call: None
        self.calls: list[str] = []
        self.batches: list[TrainBatch] = []
        self.scored: list[list[NDArray[np.float32]]] = []

    def _called(self, call: str) -> None:
        self.on_call(call)
        self.calls.append(call)

    def logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        self.scored.append(self._logprobs(batch))
        return self.scored[-1]

    def _logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        table = np.log(softmax(self.logits)).astype(np.float32)
        return [
            np.where(mask > 0, table[np.minimum(tokens, ACTIONS - 1)], np.float32(0))
            for tokens, mask in zip(batch.tokens, batch.loss_mask, strict=True)
        ]

    def reference_logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        """Of the start, which was uniform."""
        return [np.where(mask > 0, np.float32(-np.log(ACTIONS)), np.float32(0)) for mask in batch.loss_mask]

    def values(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        return [np.where(mask > 0, np.float32(0.25), np.float32(0)) for mask in batch.loss_mask]

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        self._called("train_step")
        self.batches.append(batch)
        chances, total, gap = softmax(self.logits), 0.0, 0.0
        gradient: Floats = np.zeros(ACTIONS)
        old = self._logprobs(batch)
        for i, (tokens, mask, advantages) in enumerate(
            zip(batch.tokens, batch.loss_mask, batch.advantages, strict=True)
        ):
            for token, weight, advantage in zip(tokens, mask, advantages, strict=True):
                if weight > 0:
                    gradient += weight * advantage * (np.eye(ACTIONS)[token] - chances)
                    total += float(weight)
            gap += float(np.abs(old[i] - batch.rollout_logprobs[i]).sum())
        self.logits = self.logits + self.lr * gradient / max(total, 1.0)
        return {"loss/policy": 0.0, "logprobs/gap_mean": gap / max(total, 1.0)}

    def publish_weights(self, version: int) -> dict[str, float]:
        self._called(f"publish {version}")
        self.world.engine.logits, self.world.engine.version = self.logits.copy(), str(version)
        return {}

    def save(self, path: Path) -> None:
        path.mkdir()
        np.save(path / "logits.npy", self.logits)

    def load(self, path: Path) -> None:
        self.logits = np.load(path / "logits.npy")

    def save_hf(self, model_dir: Path) -> None:
        self._called("save_hf")
        model_dir.mkdir(exist_ok=True)
        np.save(model_dir / "logits.npy", self.logits)
