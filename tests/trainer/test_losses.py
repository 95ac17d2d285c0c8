"""The loss and the corrections against float64 references written from their equations."""

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from titogym.trainer.config import LossConfig  # noqa: E402
from titogym.trainer.corrections import correction_metrics, importance_ratios, truncate  # noqa: E402
from titogym.trainer.losses import combine_metrics, policy_loss  # noqa: E402

pytestmark = pytest.mark.train

CONFIG = LossConfig(clip_low=0.2, clip_high=0.3, tis_low=0.5, tis_high=2.0)


def problem(seed: int, shape: tuple[int, ...] = (3, 11)) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    old = rng.normal(-1.5, 0.7, shape)
    return {
        "logp": old + rng.normal(0, 0.3, shape),
        "old_logp": old,
        "rollout_logp": old + rng.normal(0, 0.8, shape),
        "advantages": rng.normal(0, 1, shape),
        "mask": rng.integers(0, 2, shape).astype(float),
    }


def tensors(arrays: dict[str, Any]) -> dict[str, Any]:
    made = {name: torch.tensor(array, dtype=torch.float64) for name, array in arrays.items()}
    made["logp"].requires_grad_()
    return made


def reference(p: dict[str, Any], config: LossConfig, normalizer: float) -> tuple[float, Any]:
    """Loss and its gradient by logp, token by token, in plain Python floats."""
    total, gradient = 0.0, np.zeros_like(p["logp"])
    for at in np.ndindex(p["logp"].shape):
        logp, old, rollout, advantage, mask = (
            float(p[k][at]) for k in ("logp", "old_logp", "rollout_logp", "advantages", "mask")
        )
        weight = min(max(math.exp(old - rollout), config.tis_low), config.tis_high)
        ratio = math.exp(logp - old)
        clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        total -= mask * weight * min(ratio * advantage, clipped * advantage) / normalizer
        if ratio * advantage <= clipped * advantage:  # the unclipped branch, whose derivative is itself
            gradient[at] = -mask * weight * ratio * advantage / normalizer
    return total, gradient


@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_equal_the_reference(seed):
    arrays = problem(seed)
    expected, gradient = reference(arrays, CONFIG, arrays["mask"].sum())
    made = tensors(arrays)
    loss, metrics = policy_loss(**made, config=CONFIG)
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    np.testing.assert_allclose(made["logp"].grad.numpy(), gradient, atol=1e-12)
    assert metrics["loss/policy"] == pytest.approx(expected, rel=1e-9)
    assert metrics["loss/tokens"] == arrays["mask"].sum()


def test_microbatches_add_up_to_the_batch():
    arrays = problem(7, (6, 9))
    arrays["mask"] *= np.array([1, 0.5, 0.25, 1, 1, 0])[:, None]
    whole = tensors(arrays)
    loss, metrics = policy_loss(**whole, config=CONFIG)
    loss.backward()
    normalizer = float(arrays["mask"].sum())
    gradients, parts = [], []
    for rows in (slice(0, 2), slice(2, 5), slice(5, 6)):  # the last one has no token at all
        part = tensors({name: array[rows] for name, array in arrays.items()})
        piece, piece_metrics = policy_loss(**part, config=CONFIG, normalizer=normalizer)
        piece.backward()
        gradients.append(part["logp"].grad)
        parts.append(piece_metrics)
    torch.testing.assert_close(torch.cat(gradients), whole["logp"].grad)
    combined = combine_metrics(parts)
    assert combined.keys() == metrics.keys()
    for name, value in metrics.items():
        assert combined[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_tokens_outside_the_mask_never_matter():
    arrays = problem(3)
    clean, _ = policy_loss(**tensors(arrays), config=CONFIG)
    for name in ("logp", "old_logp", "rollout_logp", "advantages"):
        arrays[name] = np.where(arrays["mask"] > 0, arrays[name], np.nan)
    dirty_tensors = tensors(arrays)
    dirty, metrics = policy_loss(**dirty_tensors, config=CONFIG)
    dirty.backward()
    assert dirty.item() == clean.item()
    assert torch.isfinite(dirty_tensors["logp"].grad).all()
    assert all(math.isfinite(value) for value in metrics.values())


def test_at_the_old_policy_the_gradient_is_the_weighted_policy_gradient():
    arrays = problem(4)
    arrays["logp"] = arrays["old_logp"].copy()
    made = tensors(arrays)
    loss, metrics = policy_loss(**made, config=CONFIG)
    loss.backward()
    weight = np.clip(np.exp(arrays["old_logp"] - arrays["rollout_logp"]), 0.5, 2.0)
    expected = -arrays["mask"] * weight * arrays["advantages"] / arrays["mask"].sum()
    np.testing.assert_allclose(made["logp"].grad.numpy(), expected, atol=1e-12)
    assert metrics["loss/clip_fraction"] == 0
    assert metrics["loss/kl_to_old"] == 0


def test_correction_metrics_on_a_worked_example():
    old = torch.tensor([0.0, math.log(3.0), math.log(0.25), -9.0], dtype=torch.float64)
    rollout = torch.zeros(4, dtype=torch.float64)
    mask = torch.tensor([1.0, 1.0, 0.5, 0.0], dtype=torch.float64)
    got = {k: float(v) for k, v in correction_metrics(old, rollout, mask, 0.5, 2.0).items()}
    ratios = [1.0, 3.0, 0.25]
    assert got["tis/ratio_mean"] == pytest.approx(sum(ratios) / 3)
    assert got["tis/ratio_max"] == pytest.approx(3.0)
    assert got["tis/clipped_fraction"] == pytest.approx(2 / 3)
    assert got["tis/deviation"] == pytest.approx((0 + 2 + 0.75) / 3)
    assert got["tis/k3"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 3)
    assert got["logprobs/gap_mean"] == pytest.approx((math.log(3) + math.log(4)) / 3)
    assert got["logprobs/gap_max"] == pytest.approx(math.log(4))


def test_weights_are_truncated_and_carry_no_gradient():
    old = torch.tensor([0.0, 5.0, -5.0], requires_grad=True)
    weights = truncate(importance_ratios(old, torch.zeros(3)), 0.0, 2.0)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, math.exp(-5.0)]))


def test_without_tokens_loss_and_metrics_are_zero():
    arrays = problem(1)
    arrays["mask"] *= 0
    loss, metrics = policy_loss(**tensors(arrays), config=CONFIG)
    assert loss.item() == 0
    assert metrics["loss/tokens"] == 0
    assert metrics["logprobs/gap_mean"] == 0
