"""From the groups of one step to the batch that a backend trains on."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from titogym.trainer.advantages import broadcast, group_advantages
from titogym.trainer.batch import Group, Sample, TrainBatch
from titogym.trainer.config import AlgorithmSection


def train_batch(groups: Sequence[Group], algorithm: AlgorithmSection, temperature: float) -> TrainBatch:
    """All samples of `groups`, in order, with advantages on the tokens that carry loss."""
    batch = TrainBatch([], [], [], [], temperature=temperature)
    for group in groups:
        for sample, advantage in zip(
            group.samples, group_advantages(group, algorithm.advantage), strict=True
        ):
            mask = _loss_weights(sample, algorithm)
            batch.tokens.append(np.asarray(sample.tokens, dtype=np.int32))
            batch.loss_mask.append(mask)
            batch.rollout_logprobs.append(np.asarray(sample.logprobs, dtype=np.float32))
            batch.advantages.append(broadcast(advantage, mask))
    return batch


def minibatches(groups: Sequence[Group], count: int) -> list[list[int]]:
    """Places (in the order of `train_batch`) of the samples of each of `count` runs of whole groups.

    The runs hold equally many groups, to within one. `count` is at most the number of groups.
    """
    ends = np.cumsum([len(group.samples) for group in groups]).tolist()
    starts = [0, *ends[:-1]]
    cuts = [len(groups) * part // count for part in range(count + 1)]
    return [list(range(starts[first], ends[last - 1])) for first, last in pairwise(cuts)]


def _loss_weights(sample: Sample, algorithm: AlgorithmSection) -> NDArray[np.float32]:
    """`token_mean`: 1 per token. `sequence_mean`: 1/n per token, so that each sequence weighs the same."""
    mask = np.asarray(sample.loss_mask, dtype=np.float32)
    if algorithm.normalization == "sequence_mean":
        mask /= max(mask.sum(), 1.0)
    return mask
