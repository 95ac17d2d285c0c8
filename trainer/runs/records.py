"""Trajectories as records that a person can read token by token, kept beside the metrics."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titogym.harnesses.episode import EpisodeResult
from titogym.trainer.batch import Group, TrainBatch
from titogym.trainer.rollout.worker import findings_in

Record = dict[str, Any]


def spread(groups: Sequence[Group], count: int) -> list[int]:
    """Places (in the order of `train_batch`) of `count` samples, taken from all groups in turn."""
    starts, start = [], 0
    for group in groups:
        starts.append(start)
        start += len(group.samples)
    longest = max((len(group.samples) for group in groups), default=0)
    places = [
        first + number
        for number in range(longest)
        for first, group in zip(starts, groups, strict=True)
        if number < len(group.samples)
    ]
    return places[:count]


def sample_records(
    groups: Sequence[Group],
    batch: TrainBatch,
    trainer_logprobs: Mapping[int, NDArray[np.float32]],
    token_text: Callable[[int], str],
) -> list[Record]:
    """The samples of `groups` at the places that `trainer_logprobs` has, as they are trained on."""
    samples = [(group, sample) for group in groups for sample in group.samples]
    records = []
    for place, logprobs in trainer_logprobs.items():
        group, sample = samples[place]
        advantages = batch.advantages[place]
        records.append(
            {
                "task": group.task_id,
                "group": group.index,
                "episode": sample.episode,
                "reward": sample.reward,
                "advantage": float(advantages[np.argmax(batch.loss_mask[place] > 0)]),
                **sample.metadata,
                "tokens": sample.tokens,
                "texts": [token_text(token) for token in sample.tokens],
                "loss_mask": sample.loss_mask,
                "logprobs": sample.logprobs,
                "trainer_logprobs": [float(value) for value in logprobs],
                "version_spans": sample.version_spans,
            }
        )
    return records


def episode_records(episodes: Sequence[EpisodeResult], token_text: Callable[[int], str]) -> list[Record]:
    """All trajectories of some episodes that were not trained on."""
    return [
        {
            "task": episode.task_id,
            "reward": episode.reward,
            "outcome": episode.outcome,
            "error": episode.error,
            "session": trajectory.session_id,
            "leaf": trajectory.leaf,
            "turns": trajectory.turns,
            "finish_reason": trajectory.finish_reason,
            "findings": findings_in(episode, trajectory),
            "tokens": trajectory.tokens,
            "texts": [token_text(token) for token in trajectory.tokens],
            "loss_mask": trajectory.loss_mask,
            "logprobs": trajectory.logprobs,
            "version_spans": trajectory.version_spans,
        }
        for episode in episodes
        for trajectory in episode.trajectories
    ]
