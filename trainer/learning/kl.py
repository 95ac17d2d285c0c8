"""Estimators of KL(policy || reference) from the log-probs of sampled tokens; no torch is imported here.

With `r = reference_t - logp_t` on tokens sampled by the policy (Schulman 2020, "Approximating KL
divergence"):

    k1 = -r               unbiased; may be negative; as a loss its gradient is zero in expectation
    k2 = r^2 / 2          biased, never negative; as a loss its gradient is that of the KL, in expectation
    k3 = exp(r) - 1 - r   unbiased and never negative
"""

from collections.abc import Callable
from typing import Any, Literal

KlEstimator = Literal["k1", "k2", "k3"]


def estimate(kind: KlEstimator, logp: Any, reference_logp: Any, exp: Callable[[Any], Any]) -> Any:
    """One value per token, of the arrays' own kind; `exp` is numpy's or torch's."""
    r = reference_logp - logp
    if kind == "k1":
        return -r
    if kind == "k2":
        return 0.5 * r**2
    return exp(r) - 1 - r
