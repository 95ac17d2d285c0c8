"""The figures of one step: their names, what they mean, and how they are computed from counters."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from titogym.trainer.batch import Group
from titogym.trainer.learning.bins import HISTOGRAM, LAG_BUCKETS, tokens_of
from titogym.trainer.rollout.buffer import Buffer, age
from titogym.trainer.rollout.worker import RolloutWorker

UNIFORM_STEPS = 5  # so many in a row that taught nothing are worth a word
Figures = dict[str, float]
Bottleneck = Literal["rollout", "trainer", "staleness", "balanced"]

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
    "buffer/stale": "groups found too old in this step",
    "buffer/failures": "groups with too few usable episodes",
    "buffer/filtered": "groups that the filter refused",
    "buffer/retried": "of these, sent round again",
    "buffer/dropped": "of these, dropped",
    "consumption/duration_bias": "mean seconds of groups trained on, over those of all trained on or stale; "
    "below 1 the data lean to short tasks",
    "consumption/starved_tasks": "tasks that became stale again and again and were never trained on",
    "rollout/in_flight": "episodes running at the end of the step",
    "rollout/episodes": "episodes that ended during the step, or since the one before",
    "rollout/failed": "of these, failed ones",
    "rollout/aborted": "episodes that were not needed any more",
    "rollout/tokens_per_second": "sampled tokens of episodes that ended during the step, per second",
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
    "tis/masked_fraction": "share of tokens in sequences that the sequence mask left out",
    "loss/policy": "policy loss",
    "loss/kl_reference": "KL(policy || start model), by algorithm.kl_estimator",
    "loss/entropy": "entropy of the distributions that the tokens were sampled from",
    "loss/value": "half the squared error of the value head",
    "loss/dual_clip_fraction": "share of tokens where the dual clip took hold",
    "loss/tokens": "tokens that the loss was computed on",
    "loss/clip_fraction": "share of tokens where the clip of the policy ratio took hold",
    "loss/ratio_mean": "mean policy ratio, to the weights before the step",
    "loss/ratio_max": "largest policy ratio",
    "loss/kl_to_old": "k3 estimate of KL(before the step || now)",
    "logprobs/mean": "mean log-prob of the sampled tokens",
    "r3/own_agreement": "share of the engine's experts that the trainer's routers would have taken too",
    "r3/agreement": "share of the engine's experts that the trainer took, by replay",
    "optimizer/grad_norm": "norm of the gradient before clipping",
    "optimizer/lr": "learning rate",
    "eval/score": "held-out reward, at the step of the weights that earned it",
    "publish/prepare_seconds": "seconds to gather the weights under their public names",
    "publish/pause_seconds": "seconds to pause generation",
    "publish/stage_seconds": "seconds to bring the weights to the engines while they generate",
    "publish/activate_seconds": "seconds until the paused engines hold the weights",
    "publish/resume_seconds": "seconds to drop keys and values of old weights and resume generation",
    "publish/seconds": "seconds of the whole weight update",
    "publish/bytes": "bytes that travelled, after encoding",
    "publish/changed_fraction": "share of the bytes of all weights that changed (mover disk)",
    "publish/tensors_checked": "tensors compared with the engines in the preflight",
    "trainer/tokens": "tokens that went through the model, forward and backward",
    "trainer/microbatches": "forward and backward passes",
    "trainer/step_seconds": "seconds of these passes and the update",
}

for _bucket, _, _ in LAG_BUCKETS:
    _where = f" where the weights were {_bucket.replace('_', ' to ')} versions behind"
    MEANINGS |= {
        f"tis/lag_{_bucket}/deviation": "mean |m - 1|" + _where,
        f"tis/lag_{_bucket}/k3": "k3 estimate of KL(rollout || trainer)" + _where,
        f"tis/lag_{_bucket}/clipped_fraction": "share of tokens with m outside the bounds" + _where,
        f"tis/lag_{_bucket}/tokens": "tokens" + _where,
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
    aborted: int
    stale: int
    too_few: int
    filtered: int
    retried: int
    dropped: int
    waited_for_groups: float
    waited_for_room: float

    @classmethod
    def take(cls, worker: RolloutWorker, buffer: Buffer) -> "Snapshot":
        done, passed = worker.counters, buffer.counters
        return cls(
            episodes=done.episodes,
            turns=done.turns,
            tokens=done.sampled_tokens,
            mismatches=done.mismatches,
            seconds=done.seconds,
            failed=done.failures.total(),
            aborted=done.aborted,
            stale=passed.rejected["stale"],
            too_few=passed.rejected["failures"],
            filtered=passed.rejected["filtered"],
            retried=passed.retried,
            dropped=passed.dropped,
            waited_for_groups=buffer.waiting_for_groups.seconds(),
            waited_for_room=buffer.waiting_for_room.seconds(),
        )


def rollout_figures(before: Snapshot, began: Snapshot, after: Snapshot, elapsed: float) -> Figures:
    """What the worker and the buffer did in a step.

    Counts are those since `before`, the end of the last step, so that all steps together count everything;
    speed and waits are those of the `elapsed` seconds since the step `began`.
    """
    episodes = after.episodes - before.episodes
    return {
        "buffer/stale": after.stale - before.stale,
        "buffer/failures": after.too_few - before.too_few,
        "buffer/filtered": after.filtered - before.filtered,
        "buffer/retried": after.retried - before.retried,
        "buffer/dropped": after.dropped - before.dropped,
        "rollout/episodes": episodes,
        "rollout/failed": after.failed - before.failed,
        "rollout/aborted": after.aborted - before.aborted,
        "rollout/tokens_per_second": (after.tokens - began.tokens) / max(elapsed, 1e-9),
        "rollout/mismatch_rate": (after.mismatches - before.mismatches) / max(episodes, 1),
        "rollout/episode_seconds": (after.seconds - before.seconds) / max(episodes, 1),
        "time/wait": after.waited_for_groups - began.waited_for_groups,
        "time/rollout_blocked": after.waited_for_room - began.waited_for_room,
    }


def batch_figures(groups: Sequence[Group], version: int) -> Figures:
    """What one step trains on, seen when `version` is the last published one."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [list({s.episode: s.reward for s in group.samples}.values()) for group in groups]
    flat = [reward for of_group in rewards for reward in of_group]
    ages = [of_group for group in groups if (of_group := age([group], version)).coverage]
    together = age(groups, version)
    figures: Figures = {"staleness/coverage": together.coverage}
    if together.token_weighted is not None:  # a group without versions has no age, and none is made up
        figures |= {
            "staleness/old_mean": statistics.fmean(a.old or 0 for a in ages),
            "staleness/old_max": max(a.old or 0 for a in ages),
            "staleness/post_mean": statistics.fmean(a.post or 0 for a in ages),
            "staleness/spread_mean": statistics.fmean(a.spread or 0 for a in ages),
            "staleness/token_weighted": together.token_weighted,
        }
    return figures | {
        "reward/mean": statistics.fmean(flat),
        "reward/std": statistics.pstdev(flat),
        "reward/uniform_groups": statistics.fmean(len(set(of_group)) == 1 for of_group in rewards),
        "batch/groups": len(groups),
        "batch/samples": len(samples),
        "batch/tokens": sum(sum(1 for weight in s.loss_mask if weight) for s in samples),
        "batch/sequence_tokens": sum(len(s.tokens) for s in samples),
        "batch/turns": statistics.fmean(s.metadata.get("turns", 0) for s in samples),
    }


def over_updates(updates: Sequence[Figures]) -> Figures:
    """The figures of a step from those of its updates.

    Maxima of `*_max`, sums of counts and seconds, and else means, weighed by tokens.
    """
    merged: Figures = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        having = [update for update in updates if name in update]
        values = [update[name] for update in having]
        if name.endswith("_max"):
            merged[name] = max(values)
        elif name.endswith(("tokens", "batches", "seconds")) or name.startswith(HISTOGRAM):
            merged[name] = math.fsum(values)
        else:
            tokens = [tokens_of(name, update) for update in having]
            weighted = math.fsum(value * count for value, count in zip(values, tokens, strict=True))
            merged[name] = weighted / math.fsum(tokens) if any(tokens) else 0.0
    return merged


def histogram(figures: Figures) -> tuple[Figures, dict[str, float]]:
    """`figures` without the bins of the importance ratios, and those bins: upper edge -> tokens."""
    bins = {name.removeprefix(HISTOGRAM): n for name, n in figures.items() if name.startswith(HISTOGRAM)}
    return {name: value for name, value in figures.items() if not name.startswith(HISTOGRAM)}, bins


def bottleneck(figures: Figures, groups_per_step: int, capacity: int) -> dict[str, str]:
    """What held up a step, and the evidence, as two entries of its record.

    - "staleness": as many groups were rejected as too old as were trained on
    - "rollout": the trainer waited for a tenth of the step or more, longer than the rollout did
    - "trainer": the rollout waited for room in the buffer for so long
    - "balanced": none of these
    """
    waited, blocked, step = figures["time/wait"], figures["time/rollout_blocked"], figures["time/step"]
    stale, queue = figures["buffer/stale"], figures["buffer/size"]
    name: Bottleneck = "balanced"
    why = f"{queue:.0f} of {capacity} groups wait, and neither side waited for long"
    if stale >= groups_per_step:
        name, why = "staleness", f"{stale:.0f} groups were too old, more than the step trained on"
    elif max(waited, blocked) >= _NOTICEABLE * step:
        if waited >= blocked:
            name, why = "rollout", f"queue near zero: the trainer waited {waited:.1f} of {step:.1f} s"
        else:
            name, why = "trainer", f"queue at capacity: the rollout waited {blocked:.1f} of {step:.1f} s"
    return {"bottleneck": name, "bottleneck_why": why}


def uniform_steps(steps: Sequence[Mapping[str, Any]]) -> int:
    """How many of the last steps, in a row, had no group whose episodes differ in reward."""
    taught = (
        number for number, step in enumerate(reversed(steps)) if step.get("reward/uniform_groups", 0) < 1
    )
    return next(taught, len(steps))


def nothing_to_learn(steps: int) -> str:
    """What to say of so many."""
    return (
        f"In the last {steps} steps all attempts at a task got the same reward, for every task: they "
        "taught nothing, and docs/troubleshooting.md says what to change, at `reward/uniform_groups`."
    )
