"""How sequences are cut into microbatches changes neither what is scored nor the step taken."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_backend.models import SIZES, batch
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.megatron.backend import MegatronBackend
from titogym.trainer.backends.packing import microbatches, scatter
from titogym.trainer.config import OptimizerConfig

pytestmark = pytest.mark.train
CPU = torch.device("cpu")
TINY = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": True, **SIZES}

masks = st.lists(st.integers(0, 1), min_size=1, max_size=40).map(lambda mask: [0, *mask])


@given(st.lists(masks, max_size=12), st.integers(1, 64))
@settings(max_examples=60, deadline=None)
def test_every_marked_entry_is_scored_once_within_the_budget(marked, budget):
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 1000, len(mask)).astype(np.int32) for mask in marked]
    weights = [np.asarray(mask, dtype=np.float32) for mask in marked]
    as_floats = [part.astype(np.float32) for part in tokens]
    found = [np.zeros_like(part) for part in weights]
    made = list(microbatches(tokens, weights, budget, CPU))
    for micro in made:
        bounds = micro.bounds.tolist()
        assert bounds[-1] == micro.tokens.numel()
        assert micro.tokens.numel() <= budget or len(micro.members) == 1
        assert torch.equal(micro.gather(as_floats).long(), micro.targets)
        # the position before each target holds the token before it, inside the target's own sequence
        before = [tokens[i][entries - 1] for i, entries in micro.members]
        assert micro.tokens[0, micro.where].tolist() == np.concatenate(before).tolist()
        for (_, entries), start in zip(micro.members, bounds, strict=False):
            assert start + entries[-1] <= bounds[-1]
        here = [np.zeros_like(part) for part in found]
        scatter(micro.members, np.ones(len(micro.where), np.float32), here)
        for total, part in zip(found, here, strict=True):
            total += part
    for mask, seen in zip(weights, found, strict=True):
        assert (mask == seen).all()


def test_an_unpredictable_first_token_is_refused():
    with pytest.raises(ValueError, match="first token"):
        list(microbatches([np.zeros(2, np.int32)], [np.ones(2, np.float32)], 8, CPU))


@pytest.mark.parametrize("old", [False, True])
def test_the_step_does_not_depend_on_the_cut(old):
    made = batch([5, 90, 33, 61, 2, 47, 18])
    made.loss_mask[1] /= 7  # weights need not be 1
    results = {}
    for budget in (1, 70, 10_000):
        spec = BackendSpec(optimizer=OptimizerConfig(lr=1e-3), microbatch_tokens=budget)
        backend = MegatronBackend(spec)
        backend.init_random(TINY, seed=3)
        if old:
            made.old_logprobs = [part - np.float32(0.1) * (part != 0) for part in backend.logprobs(made)]
        metrics = [backend.train_step(made) for _ in range(2)][-1]
        results[budget] = metrics, {name: tensor.clone() for name, tensor in backend.export()}
    whole, weights = results[10_000]
    assert whole["trainer/microbatches"] == 1
    assert results[1][0]["trainer/microbatches"] == len(made)
    for metrics, tensors in results.values():
        for name in whole.keys() - {"trainer/microbatches", "trainer/step_seconds"}:
            assert metrics[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, weights[name], atol=2e-5, rtol=0)
