"""The Megatron model computes what transformers computes, forward and backward."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer_backend.models import KINDS, batch, reference_logprobs, save_reference
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.megatron.backend import MegatronBackend
from titogym.trainer.config.sections import OptimizerConfig

pytestmark = pytest.mark.train


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_equal_transformers(kind, tmp_path):
    model = save_reference(kind, tmp_path)
    backend = MegatronBackend(BackendSpec(microbatch_tokens=128))
    backend.load_hf(tmp_path)
    made = batch([3, 60, 17, 130, 2, 41], temperature=0.7)
    ours, theirs = backend.logprobs(made), reference_logprobs(model, made)
    assert max(np.abs(o - t).max() for o, t in zip(ours, theirs, strict=True)) <= 1e-4
    assert min(t.min() for t in theirs) < -5  # the comparison has something to compare


def test_older_config_files_mean_the_same(tmp_path):
    save_reference("qwen3-tied", tmp_path)
    backend, made = MegatronBackend(BackendSpec()), batch([60])
    backend.load_hf(tmp_path)
    (expected,) = backend.logprobs(made)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("rope_parameters") == {"rope_type": "default", "rope_theta": 1e6}
    for older, same in (({"rope_theta": 1e6, "rope_scaling": None}, True), ({"rope_theta": 1e4}, False)):
        path.write_text(json.dumps(config | older | {"torch_dtype": "float32"}))
        backend.load_hf(tmp_path)
        assert (backend.logprobs(made)[0] == expected).all() == same


@pytest.mark.parametrize("kind", ["qwen3-tied", "llama-untied"])
def test_a_step_moves_weights_like_transformers_and_adamw(kind, tmp_path):
    model = save_reference(kind, tmp_path).train()
    settings = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=0.5)
    backend = MegatronBackend(BackendSpec(optimizer=settings, microbatch_tokens=64))
    backend.load_hf(tmp_path)
    made = batch([30, 50, 12])

    decayed = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": norms, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for _ in range(3):
        metrics = backend.supervised_step(made.tokens, made.loss_mask, lr=1e-3)
        adamw.zero_grad()
        total, weight = torch.zeros(()), 0.0
        for tokens, mask in zip(made.tokens, made.loss_mask, strict=True):
            ids = torch.from_numpy(tokens.astype(np.int64))
            logp = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1)
            picked = logp.gather(-1, ids[1:, None])[:, 0]
            total = total - (picked * torch.from_numpy(mask[1:])).sum()
            weight += float(mask.sum())
        (total / weight).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adamw.step()
        assert metrics["loss/nll"] == pytest.approx(float(total.detach()) / weight, rel=1e-5)
        assert metrics["optimizer/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    theirs = model.state_dict()
    for name, tensor in backend.export():
        torch.testing.assert_close(tensor, theirs[name], atol=2e-5, rtol=0, msg=name)
