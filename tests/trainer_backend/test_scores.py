"""What a backend scores beside log-probs: the start model, entropies, values."""

import numpy as np
import pytest
import torch

from tests.trainer_backend.models import batch, save_reference
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.fsdp.backend import FsdpBackend
from titogym.trainer.backends.megatron.backend import MegatronBackend
from titogym.trainer.config.sections import LossConfig, OptimizerConfig

pytestmark = pytest.mark.train
SETTINGS = OptimizerConfig(lr=1e-2)


@pytest.mark.parametrize("made", [MegatronBackend, FsdpBackend])
def test_the_start_model_stays_what_it_was(made, tmp_path):
    save_reference("qwen3-tied", tmp_path)
    backend = made(BackendSpec(optimizer=SETTINGS, reference=True))
    backend.load_hf(tmp_path)
    data = batch([30, 50])
    before = backend.logprobs(data)
    backend.train_step(data)
    after = backend.logprobs(data)
    for first, reference in zip(before, backend.reference_logprobs(data), strict=True):
        assert (first == reference).all()
    for now, again, first in zip(after, backend.logprobs(data), before, strict=True):
        assert (now == again).all()
        assert np.abs(now - first).max() > 1e-2


@pytest.mark.parametrize("made", [MegatronBackend, FsdpBackend])
def test_entropy_is_that_of_transformers(made, tmp_path):
    model = save_reference("qwen3-tied", tmp_path)
    backend = made(BackendSpec(loss=LossConfig(entropy_coefficient=0.1)))
    backend.load_hf(tmp_path)
    data = batch([30, 50], temperature=0.7)
    expected = []
    for tokens, mask in zip(data.tokens, data.loss_mask, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, :-1] / 0.7
        entropies = torch.distributions.Categorical(logits=logits).entropy()
        expected += entropies[torch.from_numpy(mask[1:] > 0)].tolist()
    assert backend.train_step(data)["loss/entropy"] == pytest.approx(np.mean(expected), rel=1e-5)


def test_a_value_head_starts_at_nothing_and_learns_returns(tmp_path):
    save_reference("qwen3-tied", tmp_path)
    backend = MegatronBackend(BackendSpec(optimizer=SETTINGS, value_head=True))
    backend.load_hf(tmp_path)
    data = batch([30, 50])
    data.advantages = [np.zeros_like(row) for row in data.advantages]
    data.returns = [np.full(len(row), 0.7, dtype=np.float32) for row in data.tokens]
    assert all((row == 0).all() for row in backend.values(data))
    errors = [backend.train_step(data)["loss/value"] for _ in range(20)]
    assert errors[0] == pytest.approx(0.5 * 0.7**2)
    assert errors[-1] < errors[0] / 10
    values = np.concatenate([row[row != 0] for row in backend.values(data)])
    assert np.abs(values - 0.7).mean() < 0.3
    assert all(name.startswith(("model.", "lm_head.")) for name, _ in backend.export())
