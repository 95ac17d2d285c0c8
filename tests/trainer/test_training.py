"""Whole runs: real gateway, harness, sandboxes, graders and trainer process; only the engine is scripted."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from tests.trainer import drive
from tests.trainer.whole_run import engine_for, left_behind, write_config
from titogym.trainer.cluster import local
from titogym.trainer.config.file import load_config
from titogym.trainer.pages import report
from titogym.trainer.runs.directory import RunDirectory
from titogym.trainer.runs.metrics import MEANINGS
from titogym.trainer.training import run_training

pytestmark = [pytest.mark.train, pytest.mark.sandbox]


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


def test_a_run_whose_trainer_and_driver_are_killed_leaves_nothing_and_goes_on(model_dir, engine, directory):
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

    def wait_for(what: Callable[[], bool], driver: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + 200
        while not what():
            assert driver.poll() is None, (directory / "out.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def wait_for_step(step: int, driver: "subprocess.Popen[bytes]") -> None:
        wait_for(lambda: any(r["step"] >= step for r in run.metrics()), driver)

    driver = start()
    wait_for_step(2, driver)
    trainer = next(
        child
        for child in psutil.Process(driver.pid).children()
        if "titogym.trainer.backends.worker" in child.cmdline()
    )
    trainer.kill()
    note = "Replaced the trainer: continuing from step "
    wait_for(lambda: note in (directory / "out.txt").read_text(), driver)
    wait_for_step(max(run.checkpoints()) + 2, driver)
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


def test_a_synchronous_run_with_a_value_head_and_evaluation_on_its_own_engine(
    model_dir, engine, directory, monkeypatch
):
    monkeypatch.setattr(local, "TrainerProcess", drive.VersionOnlyTrainer)
    with engine_for(model_dir) as other:
        path = write_config(directory, model_dir, engine, steps=2)
        settings = {
            "run.driver": "sync",
            "eval.place": "dedicated",
            "eval.urls": f'["{other.url}"]',
            "eval.every": 1,
            "algorithm.advantage": "gae",
            "algorithm.kl": "reward",
            "algorithm.entropy_coefficient": 0.01,
            "tracking.tensorboard": "true",
            "tracking.port": 0,
        }
        config = load_config(path, [f"{key}={value}" for key, value in settings.items()])
        with (directory / "out.txt").open("w") as out:
            run = run_training(config, Console(file=out, width=160))
        assert [(e["version"], e["versions"]) for e in run.evaluations()] == [
            (version, [str(version)]) for version in range(3)
        ]
        # Each engine served one side alone.
        temperatures = [
            {request["sampling_params"]["temperature"] for request in one.requests} for one in (engine, other)
        ]
        assert temperatures == [{1.0}, {0.0}]
    for record in run.metrics():
        assert record["staleness/old_max"] == 0
        assert record["loss/value"] > 0
        assert record["loss/entropy"] > 0
        assert sum(record["histogram"].values()) == record["loss/tokens"]
    assert run.metrics()[0]["loss/kl_reference"] == 0
    assert run.metrics()[-1]["loss/kl_reference"] > 0
    assert list((run.path / "tensorboard").iterdir())
    assert "Watch this run at http://127.0.0.1:" in (directory / "out.txt").read_text()
    assert left_behind(directory) == []
