"""One tiny random Qwen3 and one real SGLang server for the whole test run.

`tests/conftest.py` exposes them to every test; those that use the server are marked `engine`.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from titogym.gateway.engines.launch import EngineOptions, EngineProcess, running

VOCABULARY = 1000  # no multiple of the 64 rows to which SGLang pads
CONTEXT_LENGTH = 4096
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
END = SPECIAL.index("<|im_end|>")


def build_tiny_model(folder: Path) -> None:
    """A seeded Qwen3 of half a million parameters in float32, with a byte-level tokenizer of its own."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    tokenizer.train_from_iterator(sources, trainer)
    missing = VOCABULARY - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<extra_{i}>") for i in range(missing)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.2,  # peaked enough that the temperature shows in the log-probs
        bos_token_id=None,
        eos_token_id=END,
    )
    model = Qwen3ForCausalLM(config).to(torch.float32)
    # A direction that every embedding shares, and the stop token's most of all: turns end by themselves
    # about every seventh token, where a plain random model would hardly ever stop.
    shared = torch.nn.functional.normalize(torch.randn(config.hidden_size), dim=0)
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings += shared
        embeddings[END] = 7 * shared
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny model, in Hugging Face format."""
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    build_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def sglang_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A real SGLang server with `tiny_model` in float32. Tests that change its weights put them back."""
    log = tmp_path_factory.mktemp("sglang") / "engine.log"
    with running(EngineOptions(str(tiny_model), dtype="float32", seed=1), log) as engine:
        yield engine
