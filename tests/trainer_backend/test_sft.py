"""The plan and the learning rate of supervised fine-tuning. That it learns: `test_process`."""

from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from titogym.trainer.learning.sft import SftConfig, learning_rate, sft


class Recorder:
    def __init__(self):
        self.steps = []

    def supervised_step(self, tokens, loss_mask, lr):
        assert [part.shape for part in tokens] == [part.shape for part in loss_mask]
        self.steps.append(([int(part[0]) for part in tokens], sum(len(part) for part in tokens), lr))
        return {"loss/nll": float(len(self.steps))}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 3))
def test_every_example_once_per_epoch_within_the_budget(lengths, epochs):
    examples = [([i] + [0] * (n - 1), [0] + [1] * (n - 1)) for i, n in enumerate(lengths)]
    config = SftConfig(epochs=epochs, tokens_per_step=60, seed=1)
    learner, again = Recorder(), Recorder()
    final = sft(learner, examples, config)
    sft(again, examples, config)
    assert learner.steps == again.steps  # seeded
    assert final == {"loss/nll": float(len(learner.steps))}
    seen = [i for members, _, _ in learner.steps for i in members]
    assert Counter(seen) == dict.fromkeys(range(len(lengths)), epochs)
    assert sorted(seen[: len(lengths)]) == list(range(len(lengths)))
    for members, size, _ in learner.steps:
        assert size <= 60 or len(members) == 1


def test_the_rate_warms_up_and_decays_to_a_tenth():
    config = SftConfig(lr=1e-2, warmup=0.1)
    rates = [learning_rate(step, 100, config) for step in range(1, 101)]
    assert rates[0] == 1e-3
    assert np.argmax(rates) == 9
    assert rates[9] == 1e-2
    assert all(a > b for a, b in pairwise(rates[9:]))
    assert np.isclose(rates[-1], 1e-3)
    assert learning_rate(1, 1, config) == 1e-2
