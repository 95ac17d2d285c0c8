"""Whole runs: real gateway, harness, sandboxes, graders and trainer process; only the engine is scripted."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from tests.doubles.scripted_engine import ScriptedEngine
from tests.templates.models import write_model_dir
from tests.trainer import drive
from titogym.templates.families import BUILT_IN
from titogym.templates.tokenizer import Tokenizer
from titogym.trainer import report
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.process import TrainerProcess
from titogym.trainer.cluster import local
from titogym.trainer.config import load_config
from titogym.trainer.metrics import MEANINGS
from titogym.trainer.runs import RunDirectory
from titogym.trainer.training import run_training

pytestmark = [pytest.mark.train, pytest.mark.sandbox]
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


@pytest.fixture
def engine(model_dir) -> Iterator[ScriptedEngine]:
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

    with ScriptedEngine(
        script, tokenizer=tokenizer, context_length=CONTEXT, model_path=str(model_dir)
    ) as engine:
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


def test_a_run_trains_evaluates_reports_and_leaves_nothing_running(model_dir, engine, directory, monkeypatch):
    monkeypatch.setattr(local, "TrainerProcess", drive.VersionOnlyTrainer)
    path = write_config(directory, model_dir, engine, steps=2)
    config = load_config(path)
    with (directory / "out.txt").open("w") as out:
        console = Console(file=out, width=160)
        run = run_training(config, console)
        report.finish(run, console)

    records = run.metrics()
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert {name for name in record if "/" in name} <= MEANINGS.keys()
        assert record["batch/samples"] == 6
        assert record["rollout/failed"] == 0
        assert record["staleness/coverage"] == 1.0
        assert record["logprobs/gap_mean"] > 0
        assert record["optimizer/grad_norm"] >= 0
        assert record["rollout/mismatch_rate"] == 0
    assert [e["version"] for e in run.evaluations()] == [0, 2]
    assert all(e["graded"] == 2 and e["failures"] == {} for e in run.evaluations())
    assert run.events() == []
    kept = dict(run.trajectories())
    record = kept["step-000001/0"]
    assert "".join(record["texts"]).endswith("Done.<|im_end|>")
    assert record["turns"] == 2
    assert record["reward"] in (0.0, 1.0)
    assert {version for _, _, version in record["version_spans"]} == {"0"}
    sampled = [request["sampling_params"] for request in engine.requests]
    assert {params["temperature"] for params in sampled} == {0.0, 1.0}  # evaluation and training
    assert {params["max_new_tokens"] for params in sampled} == {200}
    assert {params["top_p"] for params in sampled} == {1.0}
    assert (run.model / "model.safetensors").exists()
    assert (run.path / "report.html").exists()
    assert "Report:" in (directory / "out.txt").read_text()
    assert (run.logs / "driver.log").exists()
    assert left_behind(directory) == []
    assert list((directory / "sandboxes").iterdir()) == []


def test_a_run_killed_and_interrupted_leaves_nothing_and_goes_on(model_dir, engine, directory):
    path = write_config(directory, model_dir, engine, steps=50)
    run = RunDirectory(directory / "run")

    def start(*arguments: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.drive", str(path), *arguments],
            stdout=(directory / "out.txt").open("w"),
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def wait_for_step(step: int, driver: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + 200
        while not any(r["step"] >= step for r in run.metrics()):
            assert driver.poll() is None, (directory / "out.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    driver = start()
    wait_for_step(2, driver)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert left_behind(directory) == []
    checkpoint = max(run.checkpoints())
    assert checkpoint >= 1

    driver = start("--resume")
    wait_for_step(checkpoint + 2, driver)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(120) == 130
    assert left_behind(directory) == []
    assert list((directory / "sandboxes").iterdir()) == []
    text = (directory / "out.txt").read_text()
    assert f"Continuing from step {checkpoint}" in text
    assert "--resume" in text.splitlines()[-1]
    assert (run.path / "report.html").exists()
    assert run.status() is None
    steps = [record["step"] for record in run.metrics()]
    assert steps == list(range(1, len(steps) + 1))
