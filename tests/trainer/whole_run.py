"""A whole run with a scripted engine: its model, its engine, its directory, its configuration."""

import json
import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.doubles.scripted_engine import ScriptedEngine
from tests.templates.models import write_model_dir
from titogym.templates.families import BUILT_IN
from titogym.templates.tokenizer import Tokenizer
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.process import TrainerProcess

CONTEXT = 3000


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """A small random model of the quickstart family, with weights."""
    family = next(family for family in BUILT_IN if family.name == "quickstart")
    folder = write_model_dir(tmp_path_factory.mktemp("model"), family, context_length=CONTEXT)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": CONTEXT,
    }
    trainer = TrainerProcess(BackendSpec(threads=1), folder.parent / "make.log")
    try:
        trainer.init_random(config, seed=0, tokenizer_dir=folder)
        trainer.save_hf(folder)
    finally:
        trainer.close()
    return folder


def engine_for(model_dir: Path) -> ScriptedEngine:
    """Writes the word that the task asks for, or another one, and then says that it is done."""
    tokenizer = Tokenizer.load(model_dir)
    dice = random.Random(0)

    def script(prompt: list[int], params: dict[str, Any]) -> str:
        text = tokenizer.decode(prompt)
        if "<tool_response>" in text or text.count("<|im_start|>assistant") > 1:
            return "Done.<|im_end|>"
        word = re.findall(r"Write the word (\w+) to", text)[-1]
        command = f"echo {word if dice.random() < 0.5 else 'wrong'} > answer.txt"
        call = {"name": "bash", "arguments": {"command": command}}
        return f"<tool_call>{json.dumps(call)}</tool_call><|im_end|>"

    return ScriptedEngine(script, tokenizer=tokenizer, context_length=CONTEXT, model_path=str(model_dir))


@pytest.fixture
def engine(model_dir) -> Iterator[ScriptedEngine]:
    with engine_for(model_dir) as engine:
        yield engine


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory that sandbox users may enter."""
    root = Path(tempfile.mkdtemp(prefix="titogym-test-"))
    root.chmod(0o755)
    yield root
    shutil.rmtree(root)


def write_config(directory: Path, model_dir: Path, engine: ScriptedEngine, steps: int) -> Path:
    path = directory / "config.toml"
    path.write_text(f"""
[run]
dir = "{directory / "run"}"
steps = {steps}
keep_trajectories = 2

[model]
dir = "{model_dir}"

[engine]
urls = ["{engine.url}"]

[environment]
source = "tests.trainer.drive:tasks"
count = 6

[sandbox]
root = "{directory / "sandboxes"}"

[rollout]
samples_per_prompt = 3
groups_per_step = 2
episodes_in_flight = 6
max_tokens_per_turn = 200

[buffer]
capacity = 2

[optimizer]
lr = 1e-3

[checkpoint]
every = 1

[eval]
count = 2
""")
    return path


def left_behind(directory: Path, seconds: float = 10.0) -> list[str]:
    """Processes that have to do with `directory`, and sandboxes in it, once `seconds` have passed to go."""
    deadline = time.monotonic() + seconds
    while True:
        found = [
            f"{process.pid} {' '.join(process.info['cmdline'] or [])[:200]}"
            for process in psutil.process_iter(["cmdline"])
            if any(str(directory) in word for word in process.info["cmdline"] or [])
        ]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)
