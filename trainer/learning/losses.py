"""The loss: policy, KL to a reference, entropy, value. Torch is imported here: it runs in the trainer only.

Every sum runs over the tokens of the batch that carry loss, weighted by `mask` and divided by
`normalizer`, the sum of the mask over the whole batch, so that microbatches add up to the batch:

    L = - <w_t S_t> + kl_coefficient <KL_t> - entropy_coefficient <H_t> + value_coefficient <V_t>

with `<x> = sum_t mask_t x_t / normalizer`, the surrogate `S` of `algorithm.loss`, and `w` of `corrections`:
`w` bounds the mismatch between rollout and trainer, while clipping in `S` bounds the update alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titogym import dotted
from titogym.errors import UserError
from titogym.trainer.batch import TrainBatch
from titogym.trainer.config.sections import LossConfig
from titogym.trainer.learning import kl
from titogym.trainer.learning.bins import HISTOGRAM, tokens_of
from titogym.trainer.learning.corrections import correction_metrics, correction_weights, sequence_means

Gather = Callable[[list[NDArray[np.float32]]], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Tokens of one microbatch, `[m]` each; `logp`, `entropy` and `value` carry gradient.

    `sequences` (int64) tells which sequence, from 0, a token belongs to; a sequence never spans
    microbatches. What the configuration does not ask for is None.
    """

    logp: Tensor
    old_logp: Tensor  # of the weights before the first step on this data
    rollout_logp: Tensor  # of the engine
    advantages: Tensor
    mask: Tensor  # weights, not negative
    sequences: Tensor
    entropy: Tensor | None = None  # of the whole distribution over that token
    value: Tensor | None = None
    reference_logp: Tensor | None = None
    returns: Tensor | None = None
    lag: Tensor | None = None  # versions behind of the sampling weights, -1 where not known

    def where(self, selected: Tensor) -> "LossInputs":
        """Only the tokens at which `selected` `[m]` is true."""
        picked: dict[str, Any] = {}
        for column in fields(self):
            held = getattr(self, column.name)
            picked[column.name] = None if held is None else held[selected]
        return LossInputs(**picked)


# What is maximised, per token `[m]`. `algorithm.loss` may name one by dotted path.
Surrogate = Callable[[LossInputs, LossConfig], Tensor]


def log_ratios(inputs: LossInputs, config: LossConfig) -> Tensor:
    """`log r_t` of the policy ratio, `[m]`, with the gradient of `logp`.

    `token`: `r_t = exp(logp_t - old_t)` (PPO, Schulman et al. 2017). `sequence`: every one of the `n` tokens
    of a sequence has `r = exp(1/n sum_t (logp_t - old_t))` (GSPO, Zheng et al. 2025, eq. 7).
    """
    per_token = inputs.logp - inputs.old_logp.detach()
    return per_token if config.ratio == "token" else sequence_means(per_token, inputs.sequences)


def clipped_surrogate(inputs: LossInputs, config: LossConfig) -> Tensor:
    """`S_t = min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)`.

    (PPO, Schulman et al. 2017, eq. 7; with separate bounds, "clip-higher", as in DAPO, Yu et al. 2025,
    eq. 10.) With `dual_clip = c`, where `A_t < 0`: `S_t = max(S_t, c A_t)`, so that a token which became
    far more likely does not dominate (Ye et al. 2020, "Mastering complex control in MOBA games", eq. 3).
    """
    ratio = torch.exp(log_ratios(inputs, config))
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    surrogate = torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    if config.dual_clip is None:
        return surrogate
    bounded = torch.maximum(surrogate, config.dual_clip * inputs.advantages)
    return torch.where(inputs.advantages < 0, bounded, surrogate)


def surrogate_of(config: LossConfig) -> Surrogate:
    """The surrogate that `config.loss` names. Raises `UserError` when it cannot be found."""
    if config.loss == "clipped":
        return clipped_surrogate
    found: Surrogate = dotted.load(config.loss, "algorithm.loss")
    return found


def policy_loss(
    inputs: LossInputs, config: LossConfig, normalizer: float | None = None
) -> tuple[Tensor, dict[str, float]]:
    """The loss of one microbatch (see the module), and its metrics.

    `normalizer` is the sum of the mask over the whole batch; without it, over this call's tokens. The value
    loss is `V_t = 1/2 (V(s_t) - R_t)^2` (Schulman et al. 2017, eq. 9), the KL that of `kl.estimate`.

    Metrics are means over the tokens with `mask > 0`, and maxima where the name ends in `_max`;
    `loss/policy` is this call's share of the policy part, `*/tokens` and the histogram are counts.
    `combine_metrics` joins those of several microbatches. Raises `UserError` for a surrogate of another
    shape, which would be spread over all tokens.
    """
    zero = inputs.logp.sum() * 0  # of the graph, so that a microbatch without a token has a gradient too
    total = max(float(inputs.mask.sum()) if normalizer is None else normalizer, 1e-12)
    inputs = inputs.where(inputs.mask > 0)

    def mean(terms: Tensor) -> Tensor:
        return (inputs.mask * terms).sum() / total

    weights, kept = correction_weights(inputs.old_logp, inputs.rollout_logp, inputs.sequences, config)
    surrogate = surrogate_of(config)(inputs, config)
    if surrogate.shape != inputs.logp.shape:
        raise UserError(
            f"algorithm.loss {config.loss!r} must return one value per token, of shape "
            f"{tuple(inputs.logp.shape)}, not {tuple(surrogate.shape)}."
        )
    policy = -mean(weights * surrogate)
    loss = policy + torch.nan_to_num(zero)
    per_token: dict[str, Tensor] = {}
    if inputs.reference_logp is not None:
        divergence = kl.estimate(config.kl_estimator, inputs.logp, inputs.reference_logp, torch.exp)
        per_token["loss/kl_reference"] = divergence
        if config.kl == "loss":
            loss = loss + config.kl_coefficient * mean(divergence)
    if inputs.entropy is not None:
        per_token["loss/entropy"] = inputs.entropy
        loss = loss - config.entropy_coefficient * mean(inputs.entropy)
    if inputs.value is not None and inputs.returns is not None:
        errors = 0.5 * (inputs.value - inputs.returns) ** 2
        per_token["loss/value"] = errors
        loss = loss + config.value_coefficient * mean(errors)
    with torch.no_grad():
        metrics = _metrics(inputs, config, kept, per_token)
    metrics["loss/policy"] = float(policy.detach())
    metrics["loss/tokens"] = float(inputs.mask.numel())
    return loss, metrics


def batch_loss(
    batch: TrainBatch,
    gather: Gather,
    sequences: Tensor,
    scores: tuple[Tensor, Tensor | None, Tensor | None],
    config: LossConfig,
    normalizer: float,
) -> tuple[Tensor, dict[str, float]]:
    """`policy_loss` of the part of `batch` that `gather` picks from its columns.

    `scores` are log-probs, entropies and values of the current weights, `[m]`. Without `old_logprobs` the
    current log-probs are taken as constants.
    """
    logp, entropy, value = scores

    def column(name: str) -> Tensor | None:
        held = getattr(batch, name)
        return None if held is None else gather(held)

    old = column("old_logprobs")
    inputs = LossInputs(
        logp=logp,
        old_logp=logp.detach() if old is None else old,
        rollout_logp=gather(batch.rollout_logprobs),
        advantages=gather(batch.advantages),
        mask=gather(batch.loss_mask),
        sequences=sequences,
        entropy=entropy,
        value=value,
        reference_logp=column("reference_logprobs"),
        returns=column("returns"),
        lag=column("lags"),
    )
    return policy_loss(inputs, config, normalizer)


def _metrics(
    inputs: LossInputs, config: LossConfig, kept: Tensor, per_token: dict[str, Tensor]
) -> dict[str, float]:
    at = max(inputs.mask.numel(), 1)
    log_ratio = log_ratios(inputs, config)
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    bitten = clipped * inputs.advantages < ratio * inputs.advantages
    values = correction_metrics(
        inputs.old_logp, inputs.rollout_logp, config.tis_low, config.tis_high, inputs.lag
    )
    values |= {name: tensor.sum() / at for name, tensor in per_token.items()}
    values |= {
        "tis/masked_fraction": (~kept).sum() / at,
        "loss/clip_fraction": bitten.sum() / at,
        "loss/ratio_mean": ratio.sum() / at,
        "loss/ratio_max": ratio.max() if ratio.numel() else torch.zeros(()),
        # k3 of KL(old || new), on tokens that stand for samples of `old`
        "loss/kl_to_old": (ratio - 1 - log_ratio).sum() / at,
        "logprobs/mean": inputs.logp.sum() / at,
    }
    if config.dual_clip is not None:
        dual = (inputs.advantages < 0) & (ratio > config.dual_clip)
        values["loss/dual_clip_fraction"] = dual.sum() / at
    return dict(zip(values, torch.stack([v.float() for v in values.values()]).tolist(), strict=True))


def combine_metrics(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of a whole batch from those of its microbatches, or of its ranks.

    `loss/policy`, the histogram and `*/tokens` add up, `*_max` takes the maximum, and the rest is averaged,
    weighted by the `tokens` of its own group of names, or else by `loss/tokens`.
    """
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        having = [part for part in parts if name in part]
        values = [part[name] for part in having]
        if name == "loss/policy" or name.endswith("/tokens") or name.startswith(HISTOGRAM):
            combined[name] = sum(values)
        elif name.endswith("_max"):
            combined[name] = max(values)
        else:
            tokens = [tokens_of(name, part) for part in having]
            weighted = sum(value * count for value, count in zip(values, tokens, strict=True))
            combined[name] = weighted / sum(tokens) if sum(tokens) else 0.0
    return combined
