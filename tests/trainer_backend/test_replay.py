"""R3: recorded experts replace the trainer's own choice, forward and backward."""

import numpy as np
import pytest
import torch

from tests.trainer_backend.models import EXPERTS, TOP_K, batch, save_reference
from titogym.errors import UserError
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.megatron.backend import MegatronBackend
from titogym.trainer.config.sections import OptimizerConfig

pytestmark = pytest.mark.train
LAYERS = 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    found = tmp_path_factory.mktemp("moe")
    save_reference("qwen3-moe", found)
    return found


def backend(model_dir, replay, **changes):
    settings = OptimizerConfig(lr=1e-2)
    made = MegatronBackend(BackendSpec(optimizer=settings, replay_routes=replay, **changes))
    made.load_hf(model_dir)
    return made


def own_routes(model_dir, made):
    """What the routers take by themselves, recorded sequence by sequence, as an engine records it."""
    alone = backend(model_dir, replay=False)
    recorded = []
    for i, tokens in enumerate(made.tokens):
        one = made.subset([i])
        one.loss_mask[0] = np.ones_like(one.loss_mask[0])
        one.loss_mask[0][0] = 0
        alone.logprobs(one)
        rows = torch.stack(alone._replay.own_routes(), dim=1)
        assert rows.shape == (len(tokens) - 1, LAYERS, TOP_K)
        recorded.append(rows.numpy().astype(np.uint8))
    return recorded


def exact(metrics):
    return {name: v for name, v in metrics.items() if not name.endswith("seconds") and "r3/" not in name}


def forced(made, experts):
    return [np.full((len(row) - 1, LAYERS, TOP_K), experts, dtype=np.uint8) for row in made.tokens]


@pytest.mark.parametrize("recompute", [False, True])
def test_replay_of_own_routes_changes_nothing(model_dir, recompute):
    made = batch([30, 9, 61, 44])
    made.routes = own_routes(model_dir, made)
    seen = []
    for replay in (False, True):
        trained = backend(model_dir, replay, microbatch_tokens=80, recompute=recompute)
        logprobs = trained.logprobs(made)
        metrics = trained.train_step(made)
        if replay:
            assert metrics["r3/own_agreement"] == metrics["r3/agreement"] == 1
        seen.append((logprobs, exact(metrics), {name: t.clone() for name, t in trained.export()}))
    (logprobs, metrics, weights), (logprobs_replayed, metrics_replayed, weights_replayed) = seen
    assert metrics == metrics_replayed
    assert all((a == b).all() for a, b in zip(logprobs, logprobs_replayed, strict=True))
    assert all(torch.equal(weights[name], tensor) for name, tensor in weights_replayed.items())


@pytest.mark.parametrize("recompute", [False, True])
def test_other_routes_move_gradients_to_their_experts(model_dir, recompute):
    made = batch([30, 9, 61])
    made.advantages = [np.ones_like(row) for row in made.advantages]
    made.routes = forced(made, (1, 3))
    trained = backend(model_dir, replay=True, microbatch_tokens=50, recompute=recompute)
    before = {name: t.clone() for name, t in trained.export()}
    metrics = trained.train_step(made)
    assert metrics["r3/agreement"] == 1
    assert 0.2 < metrics["r3/own_agreement"] < 0.8
    after = dict(trained.export())
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            name = f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"
            assert torch.equal(before[name], after[name]) == (expert not in (1, 3))
        gate = f"model.layers.{layer}.mlp.gate.weight"
        moved = (before[gate] != after[gate]).any(1).tolist()
        assert moved == [False, True, False, True]  # the router learns from the experts that were taken


def test_each_token_takes_its_own_route(model_dir):
    """A different route for one token changes what is predicted from it on, and nothing before."""
    made = batch([20, 24])
    made.loss_mask = [np.ones_like(row) for row in made.loss_mask]
    for mask in made.loss_mask:
        mask[0] = 0
    trained = backend(model_dir, replay=True)
    made.routes = forced(made, (0, 1))
    before = trained.logprobs(made)
    made.routes[1][10] = (2, 3)
    after = trained.logprobs(made)
    assert (before[0] == after[0]).all()
    changed = before[1] != after[1]
    assert not changed[:11].any()
    assert changed[11:].all()


def test_missing_routes_fail_loudly(model_dir):
    trained = backend(model_dir, replay=True)
    made = batch([20, 24])
    with pytest.raises(ValueError, match="no expert routes"):
        trained.train_step(made)
    made.routes = forced(made, (0, 1))
    made.routes[1] = made.routes[1][:5]
    with pytest.raises(ValueError, match="sequence 1 has 5 rows"):
        trained.logprobs(made)
    made.routes = [rows[:, :1] for rows in forced(made, (0, 1))]
    with pytest.raises(ValueError, match=r"\(1, 2\) per token, not \(2, 2\)"):
        trained.logprobs(made)
    assert trained.step == 0


def test_a_dense_model_is_refused(tmp_path):
    save_reference("qwen3-tied", tmp_path)
    with pytest.raises(UserError, match=r"trainer\.r3"):
        MegatronBackend(BackendSpec(replay_routes=True)).load_hf(tmp_path)
