"""Advantages: how much better than expected each sampled token turned out to be.

An estimator takes the whole experience of a step and gives one array per sample, one entry per token, 0
where a token carries no loss. `algorithm.advantage` names one of `ESTIMATORS`, or one's own by dotted path.

Groups compare episodes, not samples: the several trajectories of one branched episode count once in
the group's mean, and share its advantage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titogym import dotted
from titogym.errors import UserError
from titogym.trainer.batch import Group
from titogym.trainer.config.sections import AlgorithmSection

Floats = NDArray[np.float64]
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Experience:
    """The groups of one step. The lists have one array per sample, in the order of the groups.

    `masks` are true where a token carries loss. `penalties` are what each token's KL to the reference
    costs, `kl_coefficient * KL_t`, 0 where KL is not charged in the reward. `values` are those of the
    value head, where there is one.
    """

    groups: Sequence[Group]
    masks: Sequence[NDArray[np.bool_]]
    penalties: Sequence[Floats]
    values: Sequence[Floats] | None = None


Estimator = Callable[[Experience, AlgorithmSection], Sequence[Floats]]


def grpo(rewards: Sequence[float], *, divide_by_std: bool = True) -> Floats:
    """Group-relative advantages of `n` episodes of one task, shape `[n]`.

        A_i = (r_i - mean(r)) / (std(r) + 1e-6)

    (GRPO, Shao et al. 2024, "DeepSeekMath", section 4.1.2; `std` over the group itself, ddof 0.) Without
    `divide_by_std`, `A_i = r_i - mean(r)` (Liu et al. 2025, "Understanding R1-Zero-like training"),
    which does not blow up the groups whose rewards hardly differ.
    """
    r = np.asarray(rewards, dtype=np.float64)
    centred: Floats = r - r.mean()
    if divide_by_std:
        centred /= float(r.std()) + _EPSILON
    return centred


def rloo(rewards: Sequence[float]) -> Floats:
    """Leave-one-out advantages of `n` episodes of one task, shape `[n]`; 0 for one that has no others.

        A_i = r_i - 1/(n - 1) sum_{j != i} r_j

    (RLOO, Ahmadian et al. 2024, "Back to basics", eq. 8.)
    """
    r = np.asarray(rewards, dtype=np.float64)
    centred: Floats = r - r.mean()
    return centred * (len(r) / max(len(r) - 1, 1))


def discounted(rewards: Floats, gamma: float) -> Floats:
    """`G_t = sum_{s >= t} gamma^(s - t) r_s`, shape of `rewards` `[n]`."""
    result, after = np.empty_like(rewards), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        result[t] = after = rewards[t] + gamma * after
    return result


def gae(rewards: Floats, values: Floats, gamma: float, lam: float) -> Floats:
    """Generalised advantages of one trajectory's `n` sampled tokens, shape `[n]`.

        delta_t = r_t + gamma V(s_{t+1}) - V(s_t),    A_t = sum_{k >= 0} (gamma lam)^k delta_{t+k}

    with `V` = 0 after the last token (GAE, Schulman et al. 2016, eq. 16). The state after a sampled token
    is the one before the next sampled token: what the environment writes in between is part of it.
    """
    following = np.append(values[1:], 0.0)
    return discounted(rewards + gamma * following - values, gamma * lam)


def _by_group(compare: Callable[[Sequence[float]], Floats]) -> Estimator:
    """One advantage per episode, from the rewards of its group; KL penalties are summed over the episode."""

    def estimate(experience: Experience, algorithm: AlgorithmSection) -> list[Floats]:
        result: list[Floats] = []
        for group, start in _starts(experience.groups):
            rewards: dict[int, float] = {}
            for place, sample in enumerate(group.samples, start):
                rewards.setdefault(sample.episode, sample.reward)
                rewards[sample.episode] -= float(experience.penalties[place].sum())
            of_episode = dict(zip(rewards, compare(list(rewards.values())).tolist(), strict=True))
            result += [
                np.where(experience.masks[place], of_episode[sample.episode], 0.0)
                for place, sample in enumerate(group.samples, start)
            ]
        return result

    return estimate


def reinforce_plus_plus(experience: Experience, algorithm: AlgorithmSection) -> list[Floats]:
    """Returns of every token, normalised over all tokens of the batch.

        A_t = r - sum_{s >= t} kl_coefficient KL_s,    A_t <- (A_t - mean(A)) / (std(A) + 1e-6)

    (REINFORCE++, Hu et al. 2025, section 3; with `gamma` below 1 the return is discounted.)
    """
    returns = [discounted(rewards, algorithm.gamma) for rewards in _token_rewards(experience)]
    everything = np.concatenate(returns) if returns else np.zeros(1)
    mean, std = everything.mean(), everything.std() + _EPSILON
    return _spread(experience, [(r - mean) / std for r in returns])


def generalised(experience: Experience, algorithm: AlgorithmSection) -> list[Floats]:
    """`gae` of every trajectory; the reward comes with its last sampled token."""
    if experience.values is None:
        raise ValueError("gae needs the values of a value head")
    return _spread(
        experience,
        [
            gae(rewards, values[mask], algorithm.gamma, algorithm.gae_lambda)
            for rewards, values, mask in zip(
                _token_rewards(experience), experience.values, experience.masks, strict=True
            )
        ],
    )


ESTIMATORS: dict[str, Estimator] = {
    "grpo": _by_group(grpo),
    "grpo_no_std": _by_group(lambda rewards: grpo(rewards, divide_by_std=False)),
    "rloo": _by_group(rloo),
    "reinforce_plus_plus": reinforce_plus_plus,
    "gae": generalised,
}


def estimator(name: str) -> Estimator:
    """One of `ESTIMATORS`, or the function at the dotted path `name`. Raises `UserError` if there is none."""
    found: Estimator = ESTIMATORS.get(name) or dotted.load(name, "algorithm.advantage")
    return found


def advantages(experience: Experience, algorithm: AlgorithmSection) -> list[NDArray[np.float32]]:
    """What `algorithm.advantage` makes of `experience`.

    Raises `UserError` when its shapes are not the samples', or a value is not finite.
    """
    made = list(estimator(algorithm.advantage)(experience, algorithm))
    if [np.shape(array) for array in made] != [mask.shape for mask in experience.masks]:
        raise UserError(
            f"algorithm.advantage {algorithm.advantage!r} must return one array per sample, as long as the "
            "sample has tokens."
        )
    masked = [
        np.where(mask, array, 0.0).astype(np.float32)
        for array, mask in zip(made, experience.masks, strict=True)
    ]
    if not all(np.isfinite(array).all() for array in masked):
        raise UserError(
            f"algorithm.advantage {algorithm.advantage!r} gave a value that is no finite number; the weights "
            "were not changed."
        )
    return masked


def _starts(groups: Sequence[Group]) -> list[tuple[Group, int]]:
    ends = np.cumsum([0, *(len(group.samples) for group in groups)]).tolist()
    return list(zip(groups, ends[:-1], strict=True))


def _token_rewards(experience: Experience) -> list[Floats]:
    """Rewards of each sample's sampled tokens: the penalties, and the episode's reward with the last one."""
    samples = [sample for group in experience.groups for sample in group.samples]
    result = []
    for sample, mask, penalty in zip(samples, experience.masks, experience.penalties, strict=True):
        rewards: Floats = -penalty[mask].astype(np.float64)
        rewards[-1:] += sample.reward
        result.append(rewards)
    return result


def _spread(experience: Experience, sampled: Sequence[Floats]) -> list[Floats]:
    """Values of sampled tokens at their places among all tokens."""
    result = []
    for mask, values in zip(experience.masks, sampled, strict=True):
        whole = np.zeros(mask.shape)
        whole[mask] = values
        result.append(whole)
    return result
