"""The policy loss. Torch is imported here: it runs in the trainer process only."""

from collections.abc import Sequence

import torch
from torch import Tensor

from titogym.trainer.config import LossConfig
from titogym.trainer.corrections import correction_metrics, importance_ratios, truncate


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    rollout_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: LossConfig,
    normalizer: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Clipped policy-gradient loss with truncated importance sampling.

    With `r_t = exp(logp_t - old_t)` and `w_t` of `corrections`, over all tokens t of the batch:

        L = - sum_t mask_t w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) / normalizer

    (PPO, Schulman et al. 2017, eq. 7; with separate bounds as in DAPO, Yu et al. 2025, eq. 8; `old` is
    the trainer's own log-prob, so that clipping bounds the update alone and `w_t` bounds the mismatch.)

    All tensors have one shape; only `logp` carries gradient. `mask` holds non-negative weights and
    `normalizer` is their sum over the whole batch, so that the losses of microbatches add up to the
    loss of the batch; without it, the sum over this call's mask.

    Metrics are means over the tokens with `mask > 0` and maxima where the name ends in `_max`;
    `loss/tokens` counts the tokens. `combine_metrics` joins those of several microbatches.
    """
    selected = mask > 0
    zero = torch.zeros((), dtype=logp.dtype, device=logp.device)
    log_ratio = torch.where(selected, logp - old_logp.detach(), zero)
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    weight = truncate(importance_ratios(old_logp, rollout_logp), config.tis_low, config.tis_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    terms = torch.where(selected, mask * weight * surrogate, zero)
    total = mask.sum() if normalizer is None else normalizer
    loss = -terms.sum() / max(float(total), 1e-12)

    with torch.no_grad():
        count = int(selected.sum())
        at = max(count, 1)
        bitten = selected & (clipped * advantages < ratio * advantages)
        values = correction_metrics(old_logp, rollout_logp, mask, config.tis_low, config.tis_high)
        values |= {
            "loss/clip_fraction": bitten.sum() / at,
            "loss/ratio_mean": torch.where(selected, ratio, zero).sum() / at,
            "loss/ratio_max": torch.where(selected, ratio, zero).max(),
            # k3 of KL(old || new), on tokens that stand for samples of `old`
            "loss/kl_to_old": torch.where(selected, ratio - 1 - log_ratio, zero).sum() / at,
            "logprobs/mean": torch.where(selected, logp, zero).sum() / at,
        }
        metrics = dict(zip(values, torch.stack([v.float() for v in values.values()]).tolist(), strict=True))
    metrics["loss/policy"] = float(loss.detach())
    metrics["loss/tokens"] = float(count)
    return loss, metrics


def combine_metrics(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of a whole batch from those of its microbatches.

    `loss/policy` and `loss/tokens` add up, `*_max` takes the maximum, the rest is averaged by tokens.
    """
    if not parts:
        return {}
    tokens = sum(part["loss/tokens"] for part in parts)
    combined: dict[str, float] = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        if name in ("loss/policy", "loss/tokens"):
            combined[name] = sum(values)
        elif name.endswith("_max"):
            combined[name] = max(values)
        else:
            weighted = sum(value * part["loss/tokens"] for value, part in zip(values, parts, strict=True))
            combined[name] = weighted / tokens if tokens else 0.0
    return combined
