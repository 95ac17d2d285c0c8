import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titogym.trainer.advantages import broadcast, group_advantages, grpo
from titogym.trainer.batch import Group, Sample
from titogym.trainer.collate import train_batch
from titogym.trainer.config import AlgorithmSection

rewards_of_a_group = st.lists(st.floats(0, 1), min_size=2, max_size=16)


def sample(reward: float, episode: int, mask: list[int]) -> Sample:
    n = len(mask)
    return Sample(list(range(n)), mask, [-0.5 * m for m in mask], [(0, n, "0")], reward, episode)


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


def test_several_trajectories_of_one_episode_count_once_and_share_its_advantage():
    branched = Group(
        "t", [sample(1, 0, [0, 1]), sample(1, 0, [0, 1]), sample(1, 0, [0, 1]), sample(0, 1, [0, 1])]
    )
    plain = Group("t", [sample(1, 0, [0, 1]), sample(0, 1, [0, 1])])
    high, low = group_advantages(plain, "grpo")
    assert group_advantages(branched, "grpo") == [high, high, high, low]


def test_broadcast_reaches_only_tokens_that_carry_loss():
    mask = np.array([0, 1, 1, 0, 1], dtype=np.float32)
    np.testing.assert_array_equal(broadcast(-0.5, mask), np.array([0, -0.5, -0.5, 0, -0.5], dtype=np.float32))


@pytest.mark.parametrize("normalization", ["token_mean", "sequence_mean"])
def test_batch_weights_tokens_or_sequences_alike(normalization):
    group = Group("t", [sample(1, 0, [0, 1, 1, 1]), sample(0, 1, [0, 0, 1])])
    algorithm = AlgorithmSection(normalization=normalization, advantage="grpo_no_std")
    batch = train_batch([group], algorithm, temperature=0.7)
    sums = [float(mask.sum()) for mask in batch.loss_mask]
    assert sums == pytest.approx([3.0, 1.0] if normalization == "token_mean" else [1.0, 1.0])
    assert batch.temperature == 0.7
    np.testing.assert_allclose(batch.advantages[0], [0, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(batch.advantages[1], [0, 0, -0.5])
    assert [len(t) for t in batch.tokens] == [4, 3]
