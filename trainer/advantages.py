"""Advantages: how much better each episode of a group did than its siblings."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from titogym.trainer.batch import Group

AdvantageKind = Literal["grpo", "grpo_no_std"]
_EPSILON = 1e-6


def grpo(rewards: Sequence[float], *, divide_by_std: bool = True) -> NDArray[np.float64]:
    """Group-relative advantages of `n` episodes of one task, shape `[n]`.

        A_i = (r_i - mean(r)) / (std(r) + 1e-6)

    (GRPO, Shao et al. 2024, "DeepSeekMath", section 4.1.2; `std` over the group itself, ddof 0.) Without
    `divide_by_std`, `A_i = r_i - mean(r)` (Liu et al. 2025, "Understanding R1-Zero-like training"),
    which does not blow up the groups whose rewards hardly differ.
    """
    r = np.asarray(rewards, dtype=np.float64)
    centred: NDArray[np.float64] = r - r.mean()
    if divide_by_std:
        centred /= float(r.std()) + _EPSILON
    return centred


def group_advantages(group: Group, kind: AdvantageKind) -> list[float]:
    """One advantage per sample of `group`.

    Episodes are compared, not samples: the several trajectories of one branched episode count once in
    the group's mean, and share its advantage.
    """
    rewards = {sample.episode: sample.reward for sample in group.samples}
    values = grpo(list(rewards.values()), divide_by_std=kind == "grpo")
    of_episode = dict(zip(rewards, values.tolist(), strict=True))
    return [of_episode[sample.episode] for sample in group.samples]


def broadcast(advantage: float, loss_mask: NDArray[np.float32]) -> NDArray[np.float32]:
    """The sample's advantage on every token that carries loss, 0 elsewhere; shape of `loss_mask`."""
    return np.where(loss_mask > 0, np.float32(advantage), np.float32(0)).astype(np.float32)
