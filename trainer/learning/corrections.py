"""Importance corrections: bound what rollout and trainer disagree on.

The engine samples token t with log-prob `rollout_t`; the trainer recomputes it under the weights that
it is about to change as `old_t`. Other kernels, other precision or older weights make the two differ:

    m_t = exp(old_t - rollout_t)

Each token's policy loss is multiplied by a weight made from `m_t`, within the bounds [l, u]:

- `truncate`: `w_t = min(max(m_t, l), u)`, truncated importance sampling (Yao et al. 2025, "Your efficient
  RL framework secretly brings you off-policy RL training")
- `clip_or_pop`: `w_t = m_t` inside the bounds and 0 outside (IcePop: Ring team 2025, "Every step evolves")
- `none`: `w_t = 1`

A sequence mask takes out whole sequences whose ratio lies outside bounds of its own; with `n` sampled
tokens t in the sequence,

- `product`: `M = exp(sum_t log m_t)`, the ratio of the sequence
- `geometric`: `M = exp(1/n sum_t log m_t)`, which does not grow with length (as the ratio of GSPO, Zheng
  et al. 2025)

Torch is imported here: these functions run in the trainer process only.
"""

import torch
from torch import Tensor

from titogym.trainer.config.sections import LossConfig
from titogym.trainer.learning.bins import HISTOGRAM_EDGES, HISTOGRAM_NAMES, LAG_BUCKETS


def sequence_sums(values: Tensor, sequences: Tensor) -> Tensor:
    """Sum of `values` `[m]` over each sequence, `[s]`; `sequences` `[m]` holds numbers from 0 to s - 1."""
    count = int(sequences.max()) + 1 if sequences.numel() else 0
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, sequences, values)


def sequence_means(values: Tensor, sequences: Tensor) -> Tensor:
    """Mean of `values` `[m]` over each sequence, given at each of its tokens, `[m]`."""
    counts = sequence_sums(torch.ones_like(values), sequences).clamp(min=1)
    return (sequence_sums(values, sequences) / counts)[sequences]


def token_weights(ratios: Tensor, config: LossConfig) -> Tensor:
    """`w_t` of `config.correction` for the ratios `m_t`, any shape."""
    low, high = config.tis_low, config.tis_high
    if config.correction == "truncate":
        return ratios.clamp(low, high)
    if config.correction == "clip_or_pop":
        return torch.where((ratios >= low) & (ratios <= high), ratios, torch.zeros_like(ratios))
    return torch.ones_like(ratios)


def correction_weights(
    old_logp: Tensor, rollout_logp: Tensor, sequences: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Each token's weight `[m]`, and whether its sequence was kept (bool `[m]`). Without gradient."""
    log_ratios = old_logp.detach() - rollout_logp
    weights = token_weights(torch.exp(log_ratios), config)
    if config.sequence_mask == "none":
        return weights, torch.ones_like(weights, dtype=torch.bool)
    if config.sequence_mask == "product":
        levels = sequence_sums(log_ratios, sequences)[sequences]
    else:
        levels = sequence_means(log_ratios, sequences)
    ratios = torch.exp(levels)
    keep = (ratios >= config.sequence_mask_low) & (ratios <= config.sequence_mask_high)
    return weights * keep, keep


def correction_metrics(
    old_logp: Tensor, rollout_logp: Tensor, low: float, high: float, lag: Tensor | None = None
) -> dict[str, Tensor]:
    """How far the trainer's log-probs are from the engine's, over tokens `[m]`.

    - `logprobs/gap_mean`, `logprobs/gap_max`: `|old_t - rollout_t|`
    - `tis/ratio_mean`, `tis/ratio_max`: `m_t` as it is, neither truncated nor masked
    - `tis/clipped_fraction`: share of tokens with `m_t` outside `[low, high]`
    - `tis/deviation`: mean `|m_t - 1|`
    - `tis/k3`: mean `(m_t - 1) - log m_t`, the unbiased and non-negative estimator of
      KL(rollout || old) on tokens sampled by the rollout (Schulman 2020, "Approximating KL divergence")
    - `tis/histogram/EDGE`: tokens with `m_t` up to that edge and above the one before
    - `tis/lag_BUCKET/deviation`, `/k3`, `/clipped_fraction`, `/tokens`: the same of the tokens whose
      weights are so many versions behind, where `lag` (`-1` for not known) is given

    Each value is a scalar tensor; all are 0 when there is no token.
    """
    difference = (old_logp.detach() - rollout_logp).float()
    counts = torch.bincount(
        torch.bucketize(torch.exp(difference), torch.tensor(HISTOGRAM_EDGES, device=difference.device)),
        minlength=len(HISTOGRAM_NAMES),
    )
    metrics = dict(zip(HISTOGRAM_NAMES, counts, strict=True))
    if lag is not None:
        for name, first, last in LAG_BUCKETS:
            inside = (lag >= first) & (lag <= last)
            metrics |= {
                f"tis/lag_{name}/{key}": value
                for key, value in _divergence(difference[inside], low, high).items()
            }
            metrics[f"tis/lag_{name}/tokens"] = inside.sum()
    if difference.numel() == 0:
        difference = torch.zeros(1, device=old_logp.device)
    ratios = torch.exp(difference)
    metrics |= {f"tis/{key}": value for key, value in _divergence(difference, low, high).items()}
    return metrics | {
        "logprobs/gap_mean": difference.abs().mean(),
        "logprobs/gap_max": difference.abs().max(),
        "tis/ratio_mean": ratios.mean(),
        "tis/ratio_max": ratios.max(),
    }


def _divergence(log_ratios: Tensor, low: float, high: float) -> dict[str, Tensor]:
    if log_ratios.numel() == 0:
        log_ratios = torch.zeros(1, device=log_ratios.device)
    ratios = torch.exp(log_ratios)
    return {
        "clipped_fraction": ((ratios < low) | (ratios > high)).float().mean(),
        "deviation": (ratios - 1).abs().mean(),
        "k3": (ratios - 1 - log_ratios).mean(),
    }
