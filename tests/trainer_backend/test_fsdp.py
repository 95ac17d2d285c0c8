"""The FSDP2 backend trains what the Megatron backend trains, and models that it does not have."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from tests.trainer_backend.models import SIZES, VOCABULARY, batch, reference_logprobs, save_reference
from titogym.errors import UserError
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.fsdp.backend import FsdpBackend
from titogym.trainer.backends.layout import Layout
from titogym.trainer.backends.megatron.backend import MegatronBackend
from titogym.trainer.config.sections import LossConfig, OptimizerConfig

pytestmark = pytest.mark.train
SETTINGS = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=0.5)


def backend(made, model_dir, **changes):
    found = made(
        BackendSpec(
            optimizer=SETTINGS, loss=LossConfig(entropy_coefficient=0.01), microbatch_tokens=100, **changes
        )
    )
    found.load_hf(model_dir)
    return found


def steps(trained, numbers):
    seen = [trained.train_step(batch([3, 60, 17, 90, 2, 41], seed=i, temperature=0.7)) for i in numbers]
    return [{name: v for name, v in metrics.items() if not name.endswith("seconds")} for metrics in seen]


@pytest.mark.parametrize("kind", ["qwen3-tied", "llama-untied", "qwen3-moe-mixed"])
def test_losses_and_weights_are_those_of_megatron(kind, tmp_path):
    model = save_reference(kind, tmp_path)
    made = batch([3, 60, 17, 90, 2, 41], temperature=0.7)
    ours = backend(FsdpBackend, tmp_path, recompute=kind == "llama-untied")
    for row, theirs in zip(ours.logprobs(made), reference_logprobs(model, made), strict=True):
        assert np.abs(row - theirs).max() <= 1e-5
    loaded = load_file(tmp_path / "model.safetensors")
    exported = dict(ours.export())
    assert exported.keys() == loaded.keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in exported.items())

    theirs = backend(MegatronBackend, tmp_path)
    for mine, other in zip(steps(ours, range(3)), steps(theirs, range(3)), strict=True):
        assert mine.keys() == other.keys()
        for name in ("loss/policy", "loss/entropy", "optimizer/grad_norm", "trainer/tokens"):
            assert mine[name] == pytest.approx(other[name], abs=1e-4), name
    exported = dict(theirs.export())
    for name, tensor in ours.export():
        torch.testing.assert_close(tensor, exported[name], atol=5e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_continues_bit_for_bit(dtype, tmp_path):
    save_reference("qwen3-tied", tmp_path)
    unbroken = backend(FsdpBackend, tmp_path, dtype=dtype)
    steps(unbroken, range(2))
    unbroken.save(tmp_path / "checkpoint")
    expected = steps(unbroken, range(2, 4))
    resumed = backend(FsdpBackend, tmp_path, dtype=dtype)
    steps(resumed, range(1))
    resumed.load(tmp_path / "checkpoint")
    assert resumed.step == 2
    assert steps(resumed, range(2, 4)) == expected


def test_a_model_that_only_transformers_has(tmp_path):
    torch.manual_seed(0)
    config = GPTNeoXConfig(**{k: v for k, v in SIZES.items() if k != "rms_norm_eps"}, hidden_dropout=0.0)
    model = GPTNeoXForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "in")
    trained = backend(FsdpBackend, tmp_path / "in")
    made = batch([30, 12, 55])
    for row, theirs in zip(trained.logprobs(made), reference_logprobs(model, made), strict=True):
        assert np.abs(row - theirs).max() <= 1e-5
    steps(trained, range(1))
    trained.save_hf(tmp_path / "out")
    again = GPTNeoXForCausalLM.from_pretrained(tmp_path / "out").eval()
    for row, theirs in zip(trained.logprobs(made), reference_logprobs(again, made), strict=True):
        assert np.abs(row - theirs).max() <= 1e-5
    assert again.config.vocab_size == VOCABULARY


def test_what_it_does_not_have_is_refused(tmp_path):
    save_reference("qwen3-tied", tmp_path)
    for changes, named in (
        ({"layout": Layout(tensor=2)}, "TP2"),
        ({"replay_routes": True}, "r3"),
        ({"value_head": True}, "value head"),
    ):
        with pytest.raises(UserError, match=named):
            backend(FsdpBackend, tmp_path, **changes)
    with pytest.raises(UserError, match="NoSuchForCausalLM"):
        FsdpBackend(BackendSpec()).init_random({"architectures": ["NoSuchForCausalLM"]}, 0)
