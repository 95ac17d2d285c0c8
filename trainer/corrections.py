"""Truncated importance sampling: bounds what rollout and trainer disagree on.

The engine samples token t with log-prob `rollout_t`; the trainer recomputes it under the weights that
it is about to change as `old_t`. Other kernels, other precision or older weights make the two differ.
Each token's loss is multiplied by the truncated importance weight (Yao et al. 2025, "Your efficient RL
framework secretly brings you off-policy RL training"):

    m_t = exp(old_t - rollout_t)
    w_t = min(max(m_t, low), high)

Torch is imported here: these functions run in the trainer process only.
"""

import torch
from torch import Tensor


def importance_ratios(old_logp: Tensor, rollout_logp: Tensor) -> Tensor:
    """`m_t = exp(old_t - rollout_t)`, any shape, without gradient."""
    return torch.exp(old_logp.detach() - rollout_logp)


def truncate(ratios: Tensor, low: float, high: float) -> Tensor:
    """`w_t = min(max(m_t, low), high)`."""
    return ratios.clamp(low, high)


def correction_metrics(
    old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, low: float, high: float
) -> dict[str, Tensor]:
    """How far the trainer's log-probs are from the engine's, over tokens with `mask > 0`.

    - `logprobs/gap_mean`, `logprobs/gap_max`: `|old_t - rollout_t|`
    - `tis/ratio_mean`, `tis/ratio_max`: `m_t` before truncation
    - `tis/clipped_fraction`: share of tokens with `m_t` outside `[low, high]`
    - `tis/deviation`: mean `|m_t - 1|`
    - `tis/k3`: mean `(m_t - 1) - log m_t`, the unbiased and non-negative estimator of
      KL(rollout || old) on tokens sampled by the rollout (Schulman 2020, "Approximating KL divergence")

    Each value is a scalar tensor; all are 0 when no token is selected.
    """
    selected = mask > 0
    difference = (old_logp.detach() - rollout_logp)[selected].float()
    if difference.numel() == 0:
        difference = torch.zeros(1, device=old_logp.device)
    ratios = torch.exp(difference)
    return {
        "logprobs/gap_mean": difference.abs().mean(),
        "logprobs/gap_max": difference.abs().max(),
        "tis/ratio_mean": ratios.mean(),
        "tis/ratio_max": ratios.max(),
        "tis/clipped_fraction": ((ratios < low) | (ratios > high)).float().mean(),
        "tis/deviation": (ratios - 1).abs().mean(),
        "tis/k3": (ratios - 1 - difference).mean(),
    }
