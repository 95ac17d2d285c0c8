"""The same code on a CUDA device: parity with transformers, and steps that repeat bit for bit."""

import numpy as np
import pytest
import torch

from tests.trainer_backend.models import batch, reference_logprobs, save_reference
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.fsdp.backend import FsdpBackend
from titogym.trainer.backends.megatron.backend import MegatronBackend
from titogym.trainer.config.sections import OptimizerConfig

pytestmark = [
    pytest.mark.train,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
@pytest.mark.parametrize("made", [MegatronBackend, FsdpBackend])
def test_parity_and_repeatable_steps(kind, made, tmp_path):
    model = save_reference(kind, tmp_path)
    data, seen = batch([3, 60, 17, 130]), []
    for _ in range(2):
        backend = made(
            BackendSpec(optimizer=OptimizerConfig(lr=1e-3), microbatch_tokens=128, deterministic=True)
        )
        backend.load_hf(tmp_path)
        for ours, theirs in zip(backend.logprobs(data), reference_logprobs(model, data), strict=True):
            assert np.abs(ours - theirs).max() <= 1e-3
        seen.append([backend.train_step(data)["loss/policy"] for _ in range(3)])
    assert seen[0] == seen[1]
