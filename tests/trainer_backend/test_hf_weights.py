"""Weights from and to Hugging Face directories."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.trainer_backend.models import KINDS, SIZES, batch, reference_logprobs, save_reference
from titogym.errors import UserError
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.megatron.backend import MegatronBackend

pytestmark = pytest.mark.train
TINY = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": True, **SIZES}


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_exact(kind, tmp_path):
    model = save_reference(kind, tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text('{"a tokenizer": 1}')
    backend = MegatronBackend(BackendSpec())
    backend.load_hf(tmp_path / "in")
    backend.save_hf(tmp_path / "out")
    before = load_file(tmp_path / "in" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys() == {name for name, _ in backend.export()}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a tokenizer": 1}'
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    made = batch([20, 33])
    for ours, theirs in zip(reference_logprobs(model, made), reference_logprobs(again, made), strict=True):
        assert (ours == theirs).all()


def test_sharded_directory_is_read(tmp_path):
    model = save_reference("llama-untied", tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(whole)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: whole[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    backend = MegatronBackend(BackendSpec())
    backend.load_hf(tmp_path)
    theirs = model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in backend.export())


def test_random_weights_follow_the_seed(tmp_path):
    def weights(seed):
        backend = MegatronBackend(BackendSpec())
        backend.init_random(TINY, seed)
        return {name: tensor.clone() for name, tensor in backend.export()}

    one, same, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert one["model.embed_tokens.weight"].std() == pytest.approx(0.1, rel=0.05)
    assert one["model.layers.1.mlp.down_proj.weight"].std() == pytest.approx(0.05, rel=0.1)
    assert (one["model.norm.weight"] == 1).all()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": None}, "architecture none"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change, named):
    with pytest.raises(UserError, match=named):
        MegatronBackend(BackendSpec()).init_random(TINY | change, seed=0)


def _drop(tensors):
    del tensors["model.norm.weight"]


def _add(tensors):
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)


def _reshape(tensors):
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(95, 64)


@pytest.mark.parametrize(
    ("damage", "named"),
    [(_drop, "model.norm.weight"), (_add, "q_proj.bias"), (_reshape, r"up_proj.weight.*\[95, 64\]")],
)
def test_weights_that_do_not_fit_the_config_are_named(damage, named, tmp_path):
    save_reference("qwen3-tied", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=named):
        MegatronBackend(BackendSpec()).load_hf(tmp_path)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        MegatronBackend(BackendSpec()).load_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(UserError, match=r"model\.safetensors"):
        MegatronBackend(BackendSpec()).load_hf(tmp_path)
