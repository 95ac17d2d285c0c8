"""The learning rate against its closed form."""

import math

import pytest

from titogym.trainer.backends.schedule import learning_rate
from titogym.trainer.config.sections import OptimizerConfig


def rates(count, **settings):
    config = OptimizerConfig(lr=2.0, **settings)
    return [learning_rate(step, config) for step in range(count)]


def test_constant_after_a_linear_warm_up():
    assert rates(6, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates(2) == [2.0, 2.0]


def test_linear_reaches_its_end_and_stays():
    found = rates(8, warmup_steps=1, schedule="linear", decay_steps=4, min_lr=0.4)
    assert found == pytest.approx([2.0, 1.6, 1.2, 0.8, 0.4, 0.4, 0.4, 0.4])


def test_cosine():
    found = rates(14, warmup_steps=2, schedule="cosine", decay_steps=10, min_lr=0.2)
    expected = [0.2 + 0.9 * (1 + math.cos(math.pi * k / 10)) for k in range(1, 11)]
    assert found == pytest.approx([1.0, 2.0, *expected, 0.2, 0.2])
