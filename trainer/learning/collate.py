"""From the groups of one step to the batch that a backend trains on."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from titogym.trainer.batch import Group, Sample, TrainBatch
from titogym.trainer.config.sections import AlgorithmSection
from titogym.trainer.learning import kl
from titogym.trainer.learning.advantages import Experience, advantages
from titogym.trainer.rollout.buffer import published


def train_batch(
    groups: Sequence[Group], algorithm: AlgorithmSection, temperature: float, version: int | None = None
) -> TrainBatch:
    """All samples of `groups`, in order; their advantages are 0 until `add_advantages`.

    With the `version` of the trainer's weights, every token knows how far behind its own were.
    """
    batch = TrainBatch([], [], [], [], temperature=temperature)
    batch.lags = None if version is None else []
    batch.routes = _routes([sample for group in groups for sample in group.samples])
    for group in groups:
        in_group = sum(sum(sample.loss_mask) for sample in group.samples)
        for sample in group.samples:
            mask = _loss_weights(sample, algorithm, in_group)
            batch.tokens.append(np.asarray(sample.tokens, dtype=np.int32))
            batch.loss_mask.append(mask)
            batch.rollout_logprobs.append(np.asarray(sample.logprobs, dtype=np.float32))
            batch.advantages.append(np.zeros_like(mask))
            if batch.lags is not None and version is not None:
                batch.lags.append(_lags(sample, version))
    return batch


def _routes(samples: Sequence[Sample]) -> list[NDArray[np.unsignedinteger]] | None:
    """The recorded experts of all samples, or None where none were asked for."""
    routes = [sample.routes for sample in samples if sample.routes is not None]
    if routes and len(routes) < len(samples):
        raise ValueError(f"{len(samples) - len(routes)} of {len(samples)} samples have no expert routes")
    return routes or None


def add_advantages(batch: TrainBatch, groups: Sequence[Group], algorithm: AlgorithmSection) -> None:
    """Fill in advantages, and returns where they are due, of what `train_batch` made of `groups`.

    Log-probs, reference and values that `algorithm` needs are in `batch` already.
    """
    masks = [mask > 0 for mask in batch.loss_mask]
    values = None if batch.values is None else [np.asarray(v, dtype=np.float64) for v in batch.values]
    experience = Experience(groups, masks, _penalties(batch, masks, algorithm), values)
    batch.advantages = advantages(experience, algorithm)
    if values is not None:
        batch.returns = [
            np.where(mask, advantage + value, 0.0).astype(np.float32)
            for mask, advantage, value in zip(masks, batch.advantages, values, strict=True)
        ]


def minibatches(groups: Sequence[Group], count: int) -> list[list[int]]:
    """Places (in the order of `train_batch`) of the samples of each of `count` runs of whole groups.

    The runs hold equally many groups, to within one. `count` is at most the number of groups.
    """
    ends = np.cumsum([len(group.samples) for group in groups]).tolist()
    starts = [0, *ends[:-1]]
    cuts = [len(groups) * part // count for part in range(count + 1)]
    return [list(range(starts[first], ends[last - 1])) for first, last in pairwise(cuts)]


def _loss_weights(sample: Sample, algorithm: AlgorithmSection, in_group: int) -> NDArray[np.float32]:
    """1 per sampled token, over what `algorithm.normalization` makes weigh the same.

    `token_mean`: nothing (DAPO, Yu et al. 2025, eq. 8). `sequence_mean`: the sampled tokens of the
    trajectory (GRPO, Shao et al. 2024, eq. 3). `prompt_mean`: those of the group (Khatri et al. 2025, "The
    art of scaling RL compute for LLMs").
    """
    mask = np.asarray(sample.loss_mask, dtype=np.float32)
    if algorithm.normalization == "sequence_mean":
        mask /= max(mask.sum(), 1.0)
    elif algorithm.normalization == "prompt_mean":
        mask /= max(in_group, 1)
    return mask


def _lags(sample: Sample, version: int) -> NDArray[np.float32]:
    """Versions behind of each token's weights; -1 where no published version sampled it."""
    lags = np.full(len(sample.tokens), -1, dtype=np.float32)
    for start, end, name in sample.version_spans:
        if (own := published(name)) is not None:
            lags[start:end] = version - own
    return lags


def _penalties(
    batch: TrainBatch, masks: Sequence[NDArray[np.bool_]], algorithm: AlgorithmSection
) -> list[NDArray[np.float64]]:
    """What each token's KL to the reference costs, by the policy before the step."""
    if algorithm.kl != "reward":
        return [np.zeros(mask.shape) for mask in masks]
    if batch.old_logprobs is None or batch.reference_logprobs is None:
        raise ValueError("KL in the reward needs the log-probs of policy and reference")
    return [
        algorithm.kl_coefficient
        * np.where(
            mask,
            kl.estimate(algorithm.kl_estimator, old.astype(np.float64), reference.astype(np.float64), np.exp),
            0.0,
        )
        for mask, old, reference in zip(masks, batch.old_logprobs, batch.reference_logprobs, strict=True)
    ]
