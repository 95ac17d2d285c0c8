"""The loss and the corrections against float64 references written from their equations."""

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from titogym.errors import UserError  # noqa: E402
from titogym.trainer.config.sections import LossConfig  # noqa: E402
from titogym.trainer.learning import kl  # noqa: E402
from titogym.trainer.learning.bins import HISTOGRAM_NAMES  # noqa: E402
from titogym.trainer.learning.corrections import correction_metrics, correction_weights  # noqa: E402
from titogym.trainer.learning.losses import LossInputs, combine_metrics, policy_loss  # noqa: E402

pytestmark = pytest.mark.train

CONFIG = LossConfig(clip_low=0.2, clip_high=0.3, tis_low=0.5, tis_high=2.0)
SEQUENCES = np.repeat(np.arange(4), [5, 9, 1, 12])
FULL = {
    "kl": "loss",
    "kl_coefficient": 0.3,
    "entropy_coefficient": 0.02,
    "value_coefficient": 0.7,
}


def problem(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    old = rng.normal(-1.5, 0.7, len(SEQUENCES))

    def near(scale: float) -> Any:
        return old + rng.normal(0, scale, len(SEQUENCES))

    return {
        "logp": near(0.3),
        "old_logp": old,
        "rollout_logp": near(0.8),
        "advantages": rng.normal(0, 1, len(SEQUENCES)),
        "mask": rng.integers(0, 2, len(SEQUENCES)) * rng.uniform(0.5, 1, len(SEQUENCES)),
        "sequences": SEQUENCES,
        "reference_logp": near(0.5),
        "entropy": rng.uniform(0, 2, len(SEQUENCES)),
        "value": rng.normal(0, 1, len(SEQUENCES)),
        "returns": rng.normal(0, 1, len(SEQUENCES)),
    }


def inputs(arrays: dict[str, Any]) -> LossInputs:
    made = {name: torch.tensor(array) for name, array in arrays.items()}
    for name in ("logp", "entropy", "value"):
        made[name].requires_grad_()
    return LossInputs(**made)


def reference(p: dict[str, Any], config: LossConfig, normalizer: float | None = None) -> float:
    """The loss, token by token, in plain Python floats."""
    chosen = [t for t in range(len(p["mask"])) if p["mask"][t] > 0]
    total = normalizer or math.fsum(p["mask"][t] for t in chosen)
    loss = 0.0
    for t in chosen:
        own = [s for s in chosen if p["sequences"][s] == p["sequences"][t]]
        log_ratio = p["logp"][t] - p["old_logp"][t]
        if config.ratio == "sequence":
            log_ratio = math.fsum(p["logp"][s] - p["old_logp"][s] for s in own) / len(own)
        ratio, advantage = math.exp(log_ratio), p["advantages"][t]
        clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        surrogate = min(ratio * advantage, clipped * advantage)
        if config.dual_clip and advantage < 0:
            surrogate = max(surrogate, config.dual_clip * advantage)
        m = math.exp(p["old_logp"][t] - p["rollout_logp"][t])
        weight = {
            "truncate": min(max(m, config.tis_low), config.tis_high),
            "clip_or_pop": m if config.tis_low <= m <= config.tis_high else 0.0,
            "none": 1.0,
        }[config.correction]
        logs = [p["old_logp"][s] - p["rollout_logp"][s] for s in own]
        level = {
            "none": None,
            "product": math.exp(math.fsum(logs)),
            "geometric": math.exp(math.fsum(logs) / len(logs)),
        }[config.sequence_mask]
        if level is not None and not config.sequence_mask_low <= level <= config.sequence_mask_high:
            weight = 0.0
        r = p["reference_logp"][t] - p["logp"][t]
        divergence = {"k1": -r, "k2": r * r / 2, "k3": math.exp(r) - 1 - r}[config.kl_estimator]
        term = -weight * surrogate
        if config.kl == "loss":
            term += config.kl_coefficient * divergence
        term -= config.entropy_coefficient * p["entropy"][t]
        term += config.value_coefficient * 0.5 * (p["value"][t] - p["returns"][t]) ** 2
        loss += p["mask"][t] * term / total
    return loss


VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "clip_higher": {"clip_low": 0.1, "clip_high": 0.5},
    "dual_clip": {"dual_clip": 1.31},
    "gspo": {"ratio": "sequence", "clip_low": 0.01, "clip_high": 0.02},
    "clip_or_pop": {"correction": "clip_or_pop", "tis_low": 0.7, "tis_high": 1.6},
    "uncorrected": {"correction": "none"},
    "product": {"sequence_mask": "product", "sequence_mask_low": 0.2, "sequence_mask_high": 3.0},
    "geometric": {"sequence_mask": "geometric", "sequence_mask_low": 0.8, "sequence_mask_high": 1.2},
    "k1": {**FULL, "kl_estimator": "k1"},
    "k2": {**FULL, "kl_estimator": "k2"},
    "k3": {**FULL, "kl_estimator": "k3"},
    "kl_in_reward": {**FULL, "kl": "reward"},  # then it is no part of the loss
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_equals_its_equation(name, seed):
    config = CONFIG.model_copy(update=VARIANTS[name])
    arrays = problem(seed)
    loss, metrics = policy_loss(inputs(arrays), config)
    assert loss.item() == pytest.approx(reference(arrays, config), abs=1e-12)
    assert metrics["loss/tokens"] == (arrays["mask"] > 0).sum()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_gradient_equals_finite_differences(name):
    config = CONFIG.model_copy(update=VARIANTS[name])
    arrays = problem(11)
    made = inputs(arrays)
    policy_loss(made, config)[0].backward()
    for column in ("logp", "entropy", "value"):
        tensor = getattr(made, column)
        for t in range(0, len(SEQUENCES), 4):
            sides = []
            for step in (1e-6, -1e-6):
                moved = {**arrays, column: arrays[column].copy()}
                moved[column][t] += step
                sides.append(reference(moved, config))
            slope = (sides[0] - sides[1]) / 2e-6
            # The first branch of a minimum, at its kink, has the slope of either side.
            assert float(tensor.grad[t]) == pytest.approx(slope, abs=2e-6), (column, t)


def test_microbatches_of_whole_sequences_add_up_to_the_batch():
    config = CONFIG.model_copy(update={**FULL, "sequence_mask": "geometric", "ratio": "sequence"})
    arrays = problem(7)
    arrays["mask"][SEQUENCES == 2] = 0
    whole = inputs(arrays)
    loss, metrics = policy_loss(whole, config)
    loss.backward()
    normalizer = float(arrays["mask"].sum())
    gradients, parts, total = [], [], 0.0
    for numbers in ((0, 1), (2,), (3,)):  # the middle one has no token at all
        chosen = np.isin(SEQUENCES, numbers)
        part = inputs({name: array[chosen] for name, array in arrays.items()})
        piece, piece_metrics = policy_loss(part, config, normalizer)
        piece.backward()
        total += piece.item()
        gradients.append(part.logp.grad)
        parts.append(piece_metrics)
    assert total == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(torch.cat(gradients), whole.logp.grad)
    combined = combine_metrics(parts)
    assert combined.keys() == metrics.keys()
    for name, value in metrics.items():
        assert combined[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_tokens_outside_the_mask_never_matter():
    config = CONFIG.model_copy(update={**FULL, "sequence_mask": "geometric", "ratio": "sequence"})
    arrays = problem(3)
    clean, _ = policy_loss(inputs(arrays), config)
    for name in arrays.keys() - {"mask", "sequences"}:
        arrays[name] = np.where(arrays["mask"] > 0, arrays[name], np.nan)
    dirty_inputs = inputs(arrays)
    dirty, metrics = policy_loss(dirty_inputs, config)
    dirty.backward()
    assert dirty.item() == clean.item()
    assert torch.isfinite(dirty_inputs.logp.grad).all()
    assert all(math.isfinite(value) for value in metrics.values())


def test_at_the_old_policy_the_gradient_is_the_weighted_policy_gradient():
    arrays = problem(4)
    arrays["logp"] = arrays["old_logp"].copy()
    made = inputs(arrays)
    loss, metrics = policy_loss(made, CONFIG)
    loss.backward()
    weight = np.clip(np.exp(arrays["old_logp"] - arrays["rollout_logp"]), 0.5, 2.0)
    expected = -arrays["mask"] * weight * arrays["advantages"] / arrays["mask"].sum()
    np.testing.assert_allclose(np.asarray(made.logp.grad), expected, atol=1e-12)
    assert metrics["loss/clip_fraction"] == 0
    assert metrics["loss/kl_to_old"] == 0


def reinforce(inputs: LossInputs, config: LossConfig) -> Any:
    """A user's own objective: A_t log p_t, without a ratio."""
    return inputs.advantages * inputs.logp


def already_a_mean(inputs: LossInputs, config: LossConfig) -> Any:
    return reinforce(inputs, config).mean()


def as_a_column(inputs: LossInputs, config: LossConfig) -> Any:
    return reinforce(inputs, config)[:, None]


@pytest.mark.parametrize("name", ["already_a_mean", "as_a_column"])
def test_a_loss_of_ones_own_gives_one_value_per_token(name):
    own = CONFIG.model_copy(update={"loss": f"tests.trainer.test_losses:{name}"})
    with pytest.raises(UserError, match="one value per token, of shape"):
        policy_loss(inputs(problem(5)), own)


def test_a_loss_of_ones_own_is_found_by_dotted_path():
    arrays = problem(5)
    own = CONFIG.model_copy(update={"loss": "tests.trainer.test_losses:reinforce", "correction": "none"})
    loss, _ = policy_loss(inputs(arrays), own)
    expected = -(arrays["mask"] * arrays["advantages"] * arrays["logp"]).sum() / arrays["mask"].sum()
    value = CONFIG.value_coefficient * 0.5 * (arrays["value"] - arrays["returns"]) ** 2
    assert loss.item() == pytest.approx(expected + (arrays["mask"] * value).sum() / arrays["mask"].sum())
    with pytest.raises(UserError, match=r"algorithm\.loss"):
        policy_loss(inputs(arrays), CONFIG.model_copy(update={"loss": "no.such:thing"}))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_estimators_of_kl_average_to_it(kind):
    """Over the whole distribution, weighted by the policy: k1 and k3 are exact, k2 to second order."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=50)
    policy = logits - np.log(np.exp(logits).sum())
    moved = logits + rng.normal(scale=0.05, size=50)
    other = moved - np.log(np.exp(moved).sum())
    exact = float((np.exp(policy) * (policy - other)).sum())
    mean = float((np.exp(policy) * kl.estimate(kind, policy, other, np.exp)).sum())
    assert mean == pytest.approx(exact, rel=1e-9 if kind != "k2" else 0.05)


# --- corrections -------------------------------------------------------------------------------------


def test_correction_metrics_on_a_worked_example():
    old = torch.tensor([0.0, math.log(3.0), math.log(0.25)], dtype=torch.float64)
    lag = torch.tensor([0.0, 5.0, -1.0])
    got = {k: float(v) for k, v in correction_metrics(old, torch.zeros(3), 0.5, 2.0, lag).items()}
    ratios = [1.0, 3.0, 0.25]
    assert got["tis/ratio_mean"] == pytest.approx(sum(ratios) / 3)
    assert got["tis/ratio_max"] == pytest.approx(3.0)
    assert got["tis/clipped_fraction"] == pytest.approx(2 / 3)
    assert got["tis/deviation"] == pytest.approx((0 + 2 + 0.75) / 3)
    assert got["tis/k3"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 3)
    assert got["logprobs/gap_mean"] == pytest.approx((math.log(3) + math.log(4)) / 3)
    assert got["logprobs/gap_max"] == pytest.approx(math.log(4))
    histogram = {name: got[name] for name in HISTOGRAM_NAMES if got[name]}
    assert histogram == {"tis/histogram/0.25": 1, "tis/histogram/1.002": 1, "tis/histogram/4": 1}
    assert got["tis/lag_4_7/tokens"] == 1
    assert got["tis/lag_4_7/deviation"] == pytest.approx(2.0)
    assert got["tis/lag_0/deviation"] == 0
    assert got["tis/lag_1/tokens"] == 0


def test_the_histogram_is_of_ratios_before_they_are_clipped():
    old = torch.linspace(-6, 6, 1001)
    got = correction_metrics(old, torch.zeros(1001), 0.0, 2.0)
    assert sum(int(got[name]) for name in HISTOGRAM_NAMES) == 1001
    assert int(got["tis/histogram/inf"]) == int((torch.exp(old) > 16).sum())


def test_by_default_ratios_are_truncated_to_two_and_carry_no_gradient():
    old = torch.tensor([0.0, 5.0, -5.0], requires_grad=True)
    weights, kept = correction_weights(old, torch.zeros(3), torch.zeros(3, dtype=torch.int64), LossConfig())
    assert not weights.requires_grad
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, math.exp(-5.0)]))
    assert kept.all()


def test_a_sequence_mask_takes_out_whole_sequences():
    """Sequence 0 has ratios 2 and 1/2 (product 1), sequence 1 has 1.5 four times (geometric mean 1.5)."""
    old = torch.tensor([math.log(2), -math.log(2)] + [math.log(1.5)] * 4)
    sequences = torch.tensor([0, 0, 1, 1, 1, 1])
    cases = (("product", 4.0, [1, 0]), ("geometric", 1.6, [1, 1]), ("geometric", 1.4, [1, 0]))
    for kind, high, keeps in cases:
        config = LossConfig.model_validate({"sequence_mask": kind, "sequence_mask_high": high})
        _, kept = correction_weights(old, torch.zeros(6), sequences, config)
        assert kept.tolist() == [bool(keeps[s]) for s in sequences]


def test_without_tokens_loss_and_metrics_are_zero():
    arrays = problem(1)
    arrays["mask"] = arrays["mask"] * 0
    made = inputs(arrays)
    loss, metrics = policy_loss(made, CONFIG.model_copy(update={**FULL, "sequence_mask": "product"}))
    assert loss.item() == 0
    loss.backward()
    assert metrics["loss/tokens"] == 0
    assert metrics["logprobs/gap_mean"] == 0
