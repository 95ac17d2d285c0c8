"""How sequences are cut into microbatches changes neither what is scored nor the step taken."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_backend.models import SIZES, batch
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.megatron.backend import MegatronBackend
from titogym.trainer.backends.packing import Share, length, microbatches, scatter
from titogym.trainer.config.sections import OptimizerConfig

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
        assert abs(metrics["loss/policy"] - whole["loss/policy"]) <= 1e-6
        for name in whole.keys() - {"trainer/microbatches", "trainer/step_seconds"}:
            assert metrics[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, weights[name], atol=2e-5, rtol=0)


@given(
    st.lists(masks, min_size=1, max_size=12),
    st.integers(1, 64),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2]),
)
@settings(max_examples=60, deadline=None)
def test_ranks_share_a_batch_without_gap_or_overlap(marked, budget, data_size, context_size):
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 1000, len(mask)).astype(np.int32) for mask in marked]
    weights = [np.asarray(mask, dtype=np.float32) for mask in marked]
    routes = [rng.integers(0, 9, (len(row) - 1, 2, 3)).astype(np.uint8) for row in tokens]
    seen = [np.zeros_like(part) for part in weights]
    counts, loads = set(), []
    for data_rank in range(data_size):
        plans = [
            microbatches(
                tokens, weights, budget, CPU, Share(data_rank, data_size, rank, context_size, 2), routes
            )
            for rank in range(context_size)
        ]
        counts |= {len(plan) for plan in plans}
        loads.append(sum(int(micro.real.sum()) for plan in plans for micro in plan))
        for parts in zip(*plans, strict=True):
            whole = torch.cat([part.mine for part in parts]).sort().values
            assert whole.tolist() == list(range(parts[0].scored))  # each scored entry on one context rank
            for part in parts:
                assert part.tokens.numel() % 2 == 0
                assert part.bounds[-1] == part.tokens.numel() * context_size
                assert part.routes is not None
                assert part.routes.shape == (part.tokens.numel(), 2, 3)
                assert (part.routes[~part.real] == torch.arange(3)).all()
            for sequence, entries in parts[0].members:
                seen[sequence][entries] += 1
    assert len(counts) == 1  # every rank passes equally often through the model
    longest = max(length(mask) for mask in weights)
    assert max(loads) - min(loads) <= longest
    for mask, found in zip(weights, seen, strict=True):
        assert (mask == found).all()
