"""Routing replay on the real engine: a session's routes, turn by turn, are those of its whole row at once."""

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.fixtures import CONTEXT_LENGTH, build_tiny_model
from tests.gateway.conftest import Served
from tests.gateway.test_turns import USER, create, sdk, trajectories
from titogym.gateway.app import create_app
from titogym.gateway.engines.launch import EngineOptions, EngineProcess, running
from titogym.gateway.settings import GatewaySettings

pytestmark = pytest.mark.engine

LAYERS, TOP_K, EXPERTS = 2, 2, 8


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded Qwen3-MoE with the tokenizer of the dense tiny model."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("tiny-qwen3-moe")
    build_tiny_model(folder)
    dense = json.loads((folder / "config.json").read_text())
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=dense["vocab_size"],
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=False,  # SGLang leaves a tied output matrix of this model uninitialised
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=dense["eos_token_id"],
    )
    Qwen3MoeForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    options = EngineOptions(str(moe), dtype="float32", seed=1, expert_routes=True)
    with running(options, tmp_path_factory.mktemp("sglang-moe") / "engine.log") as process:
        yield process


@pytest.mark.parametrize("stream", [True, False])
def test_routes_grow_with_the_session(moe: Path, engine: EngineProcess, stream: bool) -> None:
    settings = GatewaySettings(engines=(engine.url,), model_dir=moe, family="qwen3")
    gateway = Served(create_app(settings))
    url = f"http://127.0.0.1:{gateway.port}"
    try:
        session = create(url, routes=True, sampling={"max_tokens": 12, "temperature": 1.0})
        client, messages = sdk(session), [USER]
        for _ in range(3):
            asked = client.chat.completions.create(model="m", messages=messages, stream=stream)
            text = (
                "".join(chunk.choices[0].delta.content or "" for chunk in asked)
                if stream
                else asked.choices[0].message.content
            )
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
        [found] = trajectories(url, session)
    finally:
        gateway.stop()
    assert found["turns"] == 3
    routes = found["routes"]
    assert (routes["layers"], routes["top_k"], routes["itemsize"]) == (LAYERS, TOP_K, 1)
    kept = base64.b64decode(routes["data"])
    assert kept == bytes(whole_row(engine.url, found["tokens"]))


def whole_row(url: str, tokens: list[int]) -> list[int]:
    """The routes of all tokens but the last, computed in one go from nothing."""
    httpx.post(f"{url}/flush_cache", timeout=60).raise_for_status()
    body: dict[str, Any] = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_routed_experts": True,
    }
    meta = httpx.post(f"{url}/generate", json=body, timeout=120).raise_for_status().json()["meta_info"]
    wire = base64.b64decode(meta["routed_experts"])
    numbers = struct.unpack(f"<{len(wire) // 4}i", wire)
    return list(numbers[: (len(tokens) - 1) * LAYERS * TOP_K])
