"""Supervised fine-tuning with a training backend."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# (tokens, loss mask) of one conversation; the mask is 1 where a token is to be learned, 0 for the first.
Example = tuple[Sequence[int], Sequence[int]]
# step (from 1), number of steps, what `supervised_step` returned
Report = Callable[[int, int, dict[str, float]], None]


@dataclass(frozen=True, slots=True)
class SftConfig:
    """AdamW with a linear warm-up and a linear decay to a tenth of `lr`."""

    epochs: int = 1
    tokens_per_step: int = 4096  # examples are added to a step until it holds this many tokens
    lr: float = 1e-3
    warmup: float = 0.05  # share of all steps
    seed: int = 0  # order of the examples


class Learner(Protocol):
    """The part of `Backend` that fine-tuning needs."""

    def supervised_step(
        self, tokens: Sequence[NDArray[np.int32]], loss_mask: Sequence[NDArray[np.float32]], lr: float
    ) -> dict[str, float]: ...


def sft(
    learner: Learner,
    examples: Sequence[Example],
    config: SftConfig,
    report: Report = lambda step, steps, metrics: None,
) -> dict[str, float]:
    """Minimise the mean negative log-likelihood of the masked tokens. Returns the last step's metrics."""
    plan = _steps([len(tokens) for tokens, _ in examples], config)
    metrics: dict[str, float] = {}
    for number, members in enumerate(plan, start=1):
        metrics = learner.supervised_step(
            [np.asarray(examples[i][0], dtype=np.int32) for i in members],
            [np.asarray(examples[i][1], dtype=np.float32) for i in members],
            learning_rate(number, len(plan), config),
        )
        report(number, len(plan), metrics)
    return metrics


def learning_rate(step: int, steps: int, config: SftConfig) -> float:
    """Rate of `step` (from 1) out of `steps`."""
    warm = max(1, round(steps * config.warmup))
    if step <= warm:
        return config.lr * step / warm
    return config.lr * (1 - 0.9 * (step - warm) / max(1, steps - warm))


def _steps(lengths: Sequence[int], config: SftConfig) -> list[list[int]]:
    """Which examples each step sees: every one once per epoch, in a new order each time."""
    shuffle = random.Random(config.seed)
    steps: list[list[int]] = []
    for _ in range(config.epochs):
        order = list(range(len(lengths)))
        shuffle.shuffle(order)
        held = config.tokens_per_step  # a new epoch begins with a new step
        for i in order:
            if held + lengths[i] > config.tokens_per_step:
                steps.append([])
                held = 0
            steps[-1].append(i)
            held += lengths[i]
    return steps
