"""Makes the quickstart's start model: tokenizer, random weights, supervised fine-tuning."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from titogym.quickstart import corpus, tokenizer
from titogym.quickstart.corpus import Habits
from titogym.templates.model import load_model_assets
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.process import TrainerProcess
from titogym.trainer.config.sections import OptimizerConfig
from titogym.trainer.learning.sft import Example, SftConfig

VOCABULARY = 640  # most tokens; the corpus has fewer pairs to merge
CONTEXT = 1024  # tokens


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the start model is made. `demonstrations` counts conversations, about 70 tokens each."""

    demonstrations: int = 6000
    habits: Habits = field(default_factory=Habits)
    # The rate and the wide initialisation together make copying, which everything here rests on, appear
    # after some 150,000 tokens.
    sft: SftConfig = field(default_factory=lambda: SftConfig(tokens_per_step=1800, lr=2e-3))


def model_config(vocab_size: int, end_of_turn: int, padding: int) -> dict[str, Any]:
    """The config.json of a Qwen3 model of 1.1 M parameters."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "eos_token_id": end_of_turn,
        "pad_token_id": padding,
    }


def prepare_tokenizer(model_dir: Path, seed: int, recipe: Recipe = Recipe()) -> list[Example]:
    """Write the tokenizer's files and config.json to `model_dir`; return the examples to learn from."""
    conversations = list(corpus.demonstrations(recipe.demonstrations, seed, recipe.habits))
    made = tokenizer.train(corpus.texts(conversations, tokenizer.SPECIAL_TOKENS), VOCABULARY)
    tokenizer.write(made, model_dir)
    vocabulary = made.get_vocab()
    config = model_config(len(vocabulary), vocabulary[tokenizer.END_OF_TURN], vocabulary[tokenizer.PADDING])
    (model_dir / "config.json").write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))
    assets = load_model_assets(model_dir, "quickstart")
    return corpus.examples(assets, conversations)


def prepare_model(
    model_dir: Path,
    seed: int,
    report: Callable[[str], None] = lambda line: None,
    recipe: Recipe = Recipe(),
) -> Path:
    """Make the model in `model_dir` (Hugging Face format) and return it. Call from the main thread.

    The same seed gives the same model. Raises `UserError` or `TrainerError` as the trainer does.
    """
    report("Writing demonstrations and training a tokenizer on them")
    examples = prepare_tokenizer(model_dir, seed, recipe)
    total = sum(len(tokens) for tokens, _ in examples)
    report(f"Fine-tuning on {len(examples)} demonstrations, {total} tokens")
    optimizer = OptimizerConfig(beta2=0.95, weight_decay=0.01)
    trainer = TrainerProcess(BackendSpec(optimizer=optimizer), model_dir / "sft.log")

    def progress(step: int, steps: int, metrics: dict[str, float]) -> None:
        if step == steps or step % 20 == 0:
            report(f"Fine-tuning: step {step} of {steps}, loss {metrics['loss/nll']:.3f}")

    try:
        trainer.init_random(orjson.loads((model_dir / "config.json").read_bytes()), seed, model_dir)
        trainer.sft(examples, replace(recipe.sft, seed=seed), progress)
        trainer.save_hf(model_dir)
    finally:
        trainer.close()
    return model_dir
