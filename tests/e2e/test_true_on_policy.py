"""True on-policy on the CPU: the real engine's log-probs and the trainer's are the same numbers."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.engines.fixtures import CONTEXT_LENGTH, build_tiny_model
from titogym.errors import UserError
from titogym.gateway.engines.launch import EngineOptions, EngineProcess, running
from titogym.trainer import on_policy
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.process import TrainerProcess
from titogym.trainer.batch import TrainBatch
from titogym.trainer.config.sections import OptimizerConfig

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded Qwen3 whose widths the profile covers, with the tokenizer of the tiny model."""
    import json

    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("exact-qwen3")
    build_tiny_model(folder)
    tiny = json.loads((folder / "config.json").read_text())
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=tiny["vocab_size"],
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tiny["eos_token_id"],
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    options = EngineOptions(str(model_dir), dtype="float32", seed=1, exact=True)
    with running(options, tmp_path_factory.mktemp("sglang-exact") / "engine.log") as process:
        yield process


def sampled(url: str, count: int) -> TrainBatch:
    """Conversations of three turns, many at a time: prefill, reused prefixes and decoding."""
    rng = random.Random(0)

    def converse(seed: int) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        logprobs: list[float] = []
        own = random.Random(seed)
        for _ in range(3):
            told = [own.randrange(3, 250) for _ in range(own.randrange(1, 30))]
            tokens += told
            logprobs += [0.0] * len(told)
            body: dict[str, Any] = {
                "input_ids": tokens,
                "sampling_params": {
                    "max_new_tokens": own.randrange(1, 24),
                    "temperature": TEMPERATURE,
                    "ignore_eos": True,
                },
                "return_logprob": True,
            }
            answer = httpx.post(f"{url}/generate", json=body, timeout=240).raise_for_status().json()
            pairs = answer["meta_info"]["output_token_logprobs"]
            tokens += [token for _, token, _ in pairs]
            logprobs += [logprob for logprob, _, _ in pairs]
        return tokens, logprobs

    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(converse, [rng.randrange(10**6) for _ in range(count)]))
    batch = TrainBatch([], [], [], [], temperature=TEMPERATURE)
    for tokens, logprobs in found:
        rollout = np.asarray(logprobs, dtype=np.float32)
        batch.tokens.append(np.asarray(tokens, dtype=np.int32))
        batch.rollout_logprobs.append(rollout)
        batch.loss_mask.append((rollout != 0).astype(np.float32))
        batch.advantages.append(np.full(len(tokens), rng.gauss(0, 1), dtype=np.float32))
    return batch


@pytest.mark.engine
@pytest.mark.train
def test_log_probs_differ_by_nothing_over_a_run(
    model_dir: Path, engine: EngineProcess, tmp_path: Path
) -> None:
    spec = BackendSpec(backend="fsdp", optimizer=OptimizerConfig(lr=1e-3), threads=1, true_on_policy=True)
    trainer = TrainerProcess(spec, tmp_path / "trainer.log")
    try:
        trainer.load_hf(model_dir)
        trainer.connect_engines([engine.url])
        for step in range(1, 4):
            batch = sampled(engine.url, 16)
            for ours, theirs in zip(trainer.logprobs(batch), batch.rollout_logprobs, strict=True):
                assert (ours == theirs).all()
            metrics = trainer.train_step(batch)
            assert metrics["logprobs/gap_max"] == 0
            assert metrics["tis/deviation"] == 0
            assert metrics["loss/tokens"] > 300
            trainer.publish_weights(step)
        # What other weights have sampled is no longer on policy, and nothing is learned from it.
        trainer.train_step(stale := sampled(engine.url, 4))
        with pytest.raises(UserError, match="differ from the engine's by up to"):
            trainer.train_step(stale)
    finally:
        trainer.close()


QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 64,
}
RUN: dict[str, str] = {"backend": "fsdp", "dtype": "float32", "device": "cpu"}


def test_the_registered_profile_is_found() -> None:
    assert on_policy.check(QWEN3, **RUN).name == "qwen3-cpu"


@pytest.mark.parametrize(
    ("model", "run", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, "the architecture has to be Qwen3ForCausalLM"),
        ({"intermediate_size": 100}, {}, "intermediate_size = 100 has to be a multiple of 32"),
        ({}, {"backend": "megatron"}, "backend has to be fsdp"),
        ({}, {"dtype": "bfloat16"}, "dtype has to be float32"),
        ({}, {"device": "cuda"}, "device has to be cpu"),
    ],
)
def test_what_no_profile_covers_is_refused(model: dict[str, Any], run: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        on_policy.check(QWEN3 | model, **(RUN | run))
