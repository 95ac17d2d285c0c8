"""Advantages against sums written out from the equations, and the batch that carries them."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titogym.errors import UserError
from titogym.trainer.batch import Group, Sample
from titogym.trainer.config.sections import AlgorithmSection
from titogym.trainer.learning.advantages import Experience, advantages, discounted, gae, grpo, rloo
from titogym.trainer.learning.collate import add_advantages, train_batch

rewards_of_a_group = st.lists(st.floats(0, 1), min_size=2, max_size=16)
tokens = st.lists(st.floats(-2, 2), min_size=1, max_size=12)


def sample(reward: float, episode: int, mask: list[int], version: str = "0") -> Sample:
    n = len(mask)
    return Sample(list(range(n)), mask, [-0.5 * m for m in mask], [(0, n, version)], reward, episode)


def estimated(groups: list[Group], penalties=None, values=None, **settings) -> list[Any]:
    masks = [np.array(s.loss_mask) > 0 for g in groups for s in g.samples]
    costs = penalties or [np.zeros(mask.shape) for mask in masks]
    algorithm = AlgorithmSection(**settings)
    return advantages(Experience(groups, masks, costs, values), algorithm)


@given(rewards_of_a_group)
def test_grpo_equals_its_equation_in_exact_sums(rewards):
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    np.testing.assert_allclose(grpo(rewards), [(r - mean) / (std + 1e-6) for r in rewards], atol=1e-6)
    np.testing.assert_allclose(grpo(rewards, divide_by_std=False), [r - mean for r in rewards], atol=1e-12)


def test_grpo_on_a_worked_example():
    np.testing.assert_allclose(grpo([1, 0, 0, 0]), [math.sqrt(3), *[-1 / math.sqrt(3)] * 3], rtol=1e-5)


@given(st.floats(0, 1), st.integers(2, 16))
def test_equal_rewards_give_no_advantage(reward, n):
    assert np.abs(grpo([reward] * n)).max() < 1e-9
    assert np.abs(rloo([reward] * n)).max() < 1e-9


def test_an_episode_that_has_no_others_has_no_advantage():
    """A resumed run may hold such a group from before `rollout.min_episodes` was raised."""
    assert rloo([1.0]).tolist() == grpo([1.0]).tolist() == [0.0]


@given(rewards_of_a_group)
def test_rloo_compares_each_with_the_mean_of_the_others(rewards):
    others = [math.fsum(rewards[:i] + rewards[i + 1 :]) / (len(rewards) - 1) for i in range(len(rewards))]
    np.testing.assert_allclose(rloo(rewards), np.subtract(rewards, others), atol=1e-12)


@given(tokens, st.floats(0.1, 1))
def test_returns_are_discounted_sums(rewards, gamma):
    n = len(rewards)
    expected = [math.fsum(gamma ** (s - t) * rewards[s] for s in range(t, n)) for t in range(n)]
    np.testing.assert_allclose(discounted(np.array(rewards), gamma), expected, atol=1e-9)


@given(tokens, st.randoms(use_true_random=False), st.floats(0.1, 1), st.floats(0, 1))
@settings(max_examples=40)
def test_gae_equals_its_equation(rewards, rng, gamma, lam):
    n = len(rewards)
    values = [rng.uniform(-1, 1) for _ in rewards]
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0) - values[t] for t in range(n)]
    expected = [math.fsum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)]
    np.testing.assert_allclose(gae(np.array(rewards), np.array(values), gamma, lam), expected, atol=1e-9)


def test_gae_between_its_extremes():
    """With lambda 1 it is the return less the value; with 0, the next step's surprise."""
    rewards, values = np.array([0.0, 0.0, 1.0]), np.array([0.2, 0.5, 0.9])
    np.testing.assert_allclose(gae(rewards, values, 1.0, 1.0), 1.0 - values)
    np.testing.assert_allclose(gae(rewards, values, 1.0, 0.0), [0.3, 0.4, 0.1])


def test_gae_steps_from_sampled_token_to_sampled_token_and_gives_returns():
    """The environment's tokens in between take no time; the reward comes with the last sampled one."""
    group = Group("t", [sample(1, 0, [0, 1, 0, 0, 1]), sample(0, 1, [0, 1])])
    algorithm = AlgorithmSection(advantage="gae", gamma=0.5, gae_lambda=0.0)
    batch = train_batch([group], algorithm, temperature=1.0)
    values = [[9, 0.2, 9, 9, 0.6], [9, 0.3]]
    batch.values = [np.array(v, dtype=np.float32) for v in values]
    add_advantages(batch, [group], algorithm)
    np.testing.assert_allclose(batch.advantages[0], [0, 0.5 * 0.6 - 0.2, 0, 0, 1 - 0.6], atol=1e-6)
    np.testing.assert_allclose(batch.advantages[1], [0, -0.3], atol=1e-6)
    assert batch.returns is not None
    np.testing.assert_allclose(batch.returns[0], [0, 0.3, 0, 0, 1], atol=1e-6)


def test_reinforce_plus_plus_normalises_over_the_tokens_of_the_batch():
    groups = [Group("a", [sample(1, 0, [0, 1, 1])]), Group("b", [sample(0, 0, [0, 1]), sample(0, 1, [0, 1])])]
    costs = [np.array([0, 0.25, 0.25]), np.zeros(2), np.array([0, 0.5])]
    got = estimated(groups, costs, advantage="reinforce_plus_plus")
    returns = [1 - 0.5, 1 - 0.25, 0.0, -0.5]
    mean = math.fsum(returns) / 4
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in returns) / 4)
    expected = [(r - mean) / (std + 1e-6) for r in returns]
    assert [float(v) for array in got for v in array if v] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "rloo"])
def test_kl_in_the_reward_lowers_that_of_the_whole_episode(kind):
    group = Group("t", [sample(1, 0, [0, 1, 1]), sample(1, 1, [0, 1])])
    plain = estimated([group], [np.array([0, 0.1, 0.3]), np.zeros(2)], advantage=kind)
    cheaper = Group("t", [sample(0.6, 0, [0, 1, 1]), sample(1, 1, [0, 1])])
    for got, expected in zip(plain, estimated([cheaper], advantage=kind), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_reward_is_taken_between_the_policy_before_the_step_and_the_reference(estimator):
    group = Group("t", [sample(1, 0, [0, 1]), sample(1, 1, [0, 1])])
    algorithm = AlgorithmSection(
        advantage="grpo_no_std", kl="reward", kl_coefficient=0.5, kl_estimator=estimator
    )
    batch = train_batch([group], algorithm, temperature=1.0)
    batch.old_logprobs = [np.array([0, -1.0], dtype=np.float32), np.array([0, -1.0], dtype=np.float32)]
    batch.reference_logprobs = [np.array([0, -1.5], dtype=np.float32), np.array([0, -1.0], dtype=np.float32)]
    add_advantages(batch, [group], algorithm)
    r = -0.5
    cost = 0.5 * {"k1": -r, "k2": r * r / 2, "k3": math.exp(r) - 1 - r}[estimator]
    np.testing.assert_allclose(batch.advantages[0], [0, -cost / 2], atol=1e-6)
    np.testing.assert_allclose(batch.advantages[1], [0, cost / 2], atol=1e-6)


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_several_trajectories_of_one_episode_count_once_and_share_its_advantage(kind):
    one, other = sample(1, 0, [0, 1]), sample(0, 1, [0, 1])
    high, low = (float(a[1]) for a in estimated([Group("t", [one, other])], advantage=kind))
    branched = estimated([Group("t", [one, one, one, other])], advantage=kind)
    assert [float(a[1]) for a in branched] == [high, high, high, low]


def test_only_tokens_that_carry_loss_have_an_advantage():
    group = Group("t", [sample(0, 0, [0, 1, 1, 0, 1]), sample(1, 1, [0, 1])])
    got = estimated([group], advantage="grpo_no_std")
    np.testing.assert_array_equal(got[0], np.array([0, -0.5, -0.5, 0, -0.5], dtype=np.float32))


def by_length(experience: Experience, algorithm: AlgorithmSection) -> list[Any]:
    """A user's own: shorter is better."""
    return [np.full(mask.shape, -mask.sum(), dtype=float) for mask in experience.masks]


def too_short(experience: Experience, algorithm: AlgorithmSection) -> list[Any]:
    return [np.zeros(1) for _ in experience.masks]


def without_spread(experience: Experience, algorithm: AlgorithmSection) -> list[Any]:
    return [np.full(mask.shape, np.nan) for mask in experience.masks]


def test_an_estimator_of_ones_own_is_found_by_dotted_path():
    group = Group("t", [sample(0, 0, [0, 1, 1]), sample(1, 1, [0, 1])])
    got = estimated([group], advantage="tests.trainer.test_advantages:by_length")
    np.testing.assert_array_equal(got[0], [0, -2, -2])
    with pytest.raises(UserError, match="one array per sample"):
        estimated([group], advantage="tests.trainer.test_advantages:too_short")
    with pytest.raises(UserError, match="no finite number; the weights were not changed"):
        estimated([group], advantage="tests.trainer.test_advantages:without_spread")
    with pytest.raises(UserError, match=r"algorithm\.advantage"):
        estimated([group], advantage="no.such:thing")


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [
        ("token_mean", [3.0, 1.0, 1.0]),
        ("sequence_mean", [1.0, 1.0, 1.0]),
        ("prompt_mean", [0.75, 0.25, 1.0]),
    ],
)
def test_batch_weights_tokens_sequences_or_groups_alike(normalization, expected):
    groups = [
        Group("a", [sample(1, 0, [0, 1, 1, 1]), sample(0, 1, [0, 0, 1])]),
        Group("b", [sample(1, 0, [0, 1])]),
    ]
    batch = train_batch(groups, AlgorithmSection(normalization=normalization), temperature=0.7)
    assert [float(mask.sum()) for mask in batch.loss_mask] == pytest.approx(expected)
    assert batch.temperature == 0.7
    assert [len(t) for t in batch.tokens] == [4, 3, 2]


def test_every_token_knows_how_far_behind_its_weights_were():
    mixed = Sample([1] * 5, [0, 1, 1, 1, 1], [0.0] * 5, [(1, 3, "2"), (3, 4, "5"), (4, 5, "default")], 1.0)
    batch = train_batch([Group("t", [mixed])], AlgorithmSection(), 1.0, version=6)
    assert batch.lags is not None
    assert batch.lags[0].tolist() == [-1, 4, 4, 1, -1]
    assert batch.subset([0]).lags is not None
