"""The figures of one step: their names, what they mean, and how they are computed from counters."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from titogym.trainer.batch import Group
from titogym.trainer.buffer import GroupBuffer, age
from titogym.trainer.rollout import RolloutWorker

Figures = dict[str, float]
Bottleneck = Literal["rollout", "trainer", "balanced"]

# The names that a step writes to metrics.jsonl, with their meanings; a backend may add its own.
MEANINGS = {
    "reward/mean": "mean reward of the episodes trained on",
    "reward/std": "standard deviation of those rewards",
    "reward/uniform_groups": "share of groups whose episodes all have the same reward (they teach nothing)",
    "batch/groups": "groups trained on",
    "batch/samples": "trajectories trained on",
    "batch/tokens": "sampled tokens trained on (those that carry loss)",
    "batch/sequence_tokens": "tokens of the trajectories, prompts and tool output included",
    "batch/turns": "mean turns per trajectory",
    "staleness/old_mean": "mean over groups of S_old: versions behind of the oldest sampling weights",
    "staleness/old_max": "largest S_old",
    "staleness/post_mean": "mean over groups of S_post: versions behind of the newest sampling weights",
    "staleness/spread_mean": "mean over groups of the versions between oldest and newest sampling weights",
    "staleness/token_weighted": "mean age over all tokens that carry loss",
    "staleness/coverage": "share of samples whose tokens carry a published version",
    "buffer/size": "groups waiting after the step's were taken",
    "buffer/rejected": "groups found too old in this step",
    "buffer/retried": "of these, sent round again",
    "buffer/dropped": "of these, dropped",
    "rollout/in_flight": "episodes running at the end of the step",
    "rollout/episodes": "episodes that ended during the step",
    "rollout/failed": "of these, failed ones",
    "rollout/discarded": "groups with fewer than two usable episodes",
    "rollout/tokens_per_second": "sampled tokens of ended episodes per second",
    "rollout/mismatch_rate": "share of ended episodes whose session reports a tito_session_mismatch",
    "rollout/episode_seconds": "mean duration of the episodes that ended",
    "time/step": "seconds of the whole step, evaluation and checkpoint left out",
    "time/wait": "seconds the trainer waited for groups",
    "time/logprobs": "seconds to score the batch before the step, or the trajectories kept for reading",
    "time/train": "seconds of the optimizer step",
    "time/publish": "seconds to bring the new weights into the engines",
    "time/rollout_blocked": "seconds the rollout waited for room in the buffer",
    "logprobs/gap_mean": "mean |trainer - rollout log-prob| over sampled tokens",
    "logprobs/gap_max": "largest such difference",
    "tis/ratio_mean": "mean of m = exp(trainer - rollout log-prob), before truncation",
    "tis/ratio_max": "largest m",
    "tis/clipped_fraction": "share of tokens whose m lies outside the bounds",
    "tis/deviation": "mean |m - 1|",
    "tis/k3": "k3 estimate of KL(rollout || trainer)",
    "loss/policy": "policy loss",
    "loss/tokens": "tokens that the loss was computed on",
    "loss/clip_fraction": "share of tokens where the clip of the policy ratio took hold",
    "loss/ratio_mean": "mean policy ratio, to the weights before the step",
    "loss/ratio_max": "largest policy ratio",
    "loss/kl_to_old": "k3 estimate of KL(before the step || now)",
    "logprobs/mean": "mean log-prob of the sampled tokens",
    "optimizer/grad_norm": "norm of the gradient before clipping",
    "optimizer/lr": "learning rate",
    "publish/prepare_seconds": "seconds to gather the weights under their public names",
    "publish/pause_seconds": "seconds to pause generation",
    "publish/transfer_seconds": "seconds to broadcast the weights and load them",
    "publish/resume_seconds": "seconds to drop keys and values of old weights and resume generation",
    "publish/seconds": "seconds of the whole weight update",
    "publish/bytes": "bytes broadcast",
    "trainer/tokens": "tokens that went through the model, forward and backward",
    "trainer/microbatches": "forward and backward passes",
    "trainer/step_seconds": "seconds of these passes and the update",
}

_NOTICEABLE = 0.1  # share of a step that one side must wait before the other is called the bottleneck


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters at one moment; the difference of two describes what lies between."""

    episodes: int
    turns: int
    tokens: int
    mismatches: int
    seconds: float
    failed: int
    discarded: int
    rejected: int
    retried: int
    dropped: int
    waited_for_groups: float
    waited_for_room: float

    @classmethod
    def take(cls, worker: RolloutWorker, buffer: GroupBuffer) -> "Snapshot":
        done, passed = worker.counters, buffer.counters
        return cls(
            episodes=done.episodes,
            turns=done.turns,
            tokens=done.sampled_tokens,
            mismatches=done.mismatches,
            seconds=done.seconds,
            failed=done.failures.total(),
            discarded=done.discarded,
            rejected=passed.stale,
            retried=passed.retried,
            dropped=passed.dropped,
            waited_for_groups=buffer.waiting_for_groups.seconds(),
            waited_for_room=buffer.waiting_for_room.seconds(),
        )


def rollout_figures(before: Snapshot, after: Snapshot, elapsed: float) -> Figures:
    """What the worker and the buffer did in the `elapsed` seconds between two snapshots."""
    episodes = after.episodes - before.episodes
    return {
        "buffer/rejected": after.rejected - before.rejected,
        "buffer/retried": after.retried - before.retried,
        "buffer/dropped": after.dropped - before.dropped,
        "rollout/episodes": episodes,
        "rollout/failed": after.failed - before.failed,
        "rollout/discarded": after.discarded - before.discarded,
        "rollout/tokens_per_second": (after.tokens - before.tokens) / max(elapsed, 1e-9),
        "rollout/mismatch_rate": (after.mismatches - before.mismatches) / max(episodes, 1),
        "rollout/episode_seconds": (after.seconds - before.seconds) / max(episodes, 1),
        "time/wait": after.waited_for_groups - before.waited_for_groups,
        "time/rollout_blocked": after.waited_for_room - before.waited_for_room,
    }


def batch_figures(groups: Sequence[Group], version: int) -> Figures:
    """What one step trains on, seen when `version` is the last published one."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [list({s.episode: s.reward for s in group.samples}.values()) for group in groups]
    flat = [reward for of_group in rewards for reward in of_group]
    ages = [age([group], version) for group in groups]
    together = age(groups, version)
    return {
        "reward/mean": statistics.fmean(flat),
        "reward/std": statistics.pstdev(flat),
        "reward/uniform_groups": statistics.fmean(len(set(of_group)) == 1 for of_group in rewards),
        "batch/groups": len(groups),
        "batch/samples": len(samples),
        "batch/tokens": sum(sum(1 for weight in s.loss_mask if weight) for s in samples),
        "batch/sequence_tokens": sum(len(s.tokens) for s in samples),
        "batch/turns": statistics.fmean(s.metadata.get("turns", 0) for s in samples),
        "staleness/old_mean": statistics.fmean(a.old for a in ages),
        "staleness/old_max": max(a.old for a in ages),
        "staleness/post_mean": statistics.fmean(a.post for a in ages),
        "staleness/spread_mean": statistics.fmean(a.spread for a in ages),
        "staleness/token_weighted": together.token_weighted,
        "staleness/coverage": together.coverage,
    }


def over_updates(updates: Sequence[Figures]) -> Figures:
    """The figures of a step from those of its updates: maxima of `*_max`, sums of counts, else means."""
    if len(updates) == 1:
        return dict(updates[0])
    merge: Callable[[list[float]], float]
    merged = {}
    for name in updates[0]:
        if name.endswith("_max"):
            merge = max
        elif name.endswith(("tokens", "batches", "seconds")):
            merge = math.fsum
        else:
            merge = statistics.fmean
        merged[name] = merge([update[name] for update in updates])
    return merged


def bottleneck(trainer_waited: float, rollout_waited: float, step: float) -> Bottleneck:
    """The side that the other one waited for, by seconds waited in a step that took `step` seconds.

    "balanced" when neither waited for a tenth of the step.
    """
    if max(trainer_waited, rollout_waited) < _NOTICEABLE * step:
        return "balanced"
    return "rollout" if trainer_waited >= rollout_waited else "trainer"
