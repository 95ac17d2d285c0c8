"""What a kill leaves in a run directory, and what becomes of it when a run starts there or goes on."""

import asyncio
import io
import os
import signal
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.trainer.test_asynchronous import Case, configuration, raise_at
from tests.trainer.test_evaluation import Dedicated
from titogym.cli.main import app
from titogym.errors import UserError
from titogym.trainer import training
from titogym.trainer.backends.process import TrainerGone
from titogym.trainer.rollout.buffer import BufferSettings
from titogym.trainer.runs.directory import RunDirectory
from titogym.trainer.runs.progress import Progress
from titogym.trainer.training import _explained as explained


async def test_a_run_does_not_take_over_the_scores_of_one_that_came_to_no_step(tmp_path):
    first = Case(tmp_path)
    first.trainer.on_call = raise_at("train_step", "killed")
    with pytest.raises(RuntimeError, match="killed"):
        await first.go()
    assert [e["version"] for e in RunDirectory(tmp_path).evaluations()] == [0]
    second = Case(tmp_path)
    second.trainer.logits = np.array([0.0, 0.0, 0.0, 5.0])  # another model
    run = await second.go()
    assert run.evaluations()[0]["score"] > 0.9


@pytest.mark.parametrize("driver", ["sync", "async"])
async def test_an_evaluation_that_a_kill_interrupted_is_made_after_the_resume(tmp_path, driver):
    changes = {"run__driver": driver, "eval__every": 2, "checkpoint__every": 1}
    first = Case(tmp_path, **changes)
    evaluate = first.world.run_eval_episode

    async def killed(task, labels):
        if labels["evaluation"] == "4":
            raise RuntimeError("killed")
        return await evaluate(task, labels)

    first.world.run_eval_episode = killed  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="killed"):
        await first.go()
    run = await Case(tmp_path, **changes).go(resume=True)
    assert [e["version"] for e in run.evaluations()] == [0, 2, 4, 6]
    assert [e["versions"] for e in run.evaluations()] == [["0"], ["2"], ["4"], ["6"]]


async def test_a_snapshot_of_the_checkpoint_is_scored_once_after_the_resume(tmp_path):
    changes = {"run__driver": "sync", "eval__every": 2, "checkpoint__every": 2}
    first = Dedicated(tmp_path, **changes)
    first.evaluation.delay = 10
    first.trainer.on_call = raise_at("publish 3", "killed")
    with pytest.raises(RuntimeError, match="killed"):
        await first.go()
    assert RunDirectory(tmp_path).evaluation_snapshots_taken() == [0, 2]
    second = Dedicated(tmp_path, **changes)
    run = await second.go(resume=True)
    assert sorted(second.evaluation.loaded) == [0, 2, 4, 6]
    assert [e["version"] for e in run.evaluations()] == [0, 2, 4, 6]


async def test_a_finished_run_does_not_write_its_last_checkpoint_again(tmp_path):
    run = await Case(tmp_path).go()
    path = run.checkpoints()[6]
    before = path.stat().st_ino
    await Case(tmp_path).go(resume=True)
    assert path.stat().st_ino == before  # a kill while it is replaced would lose it


async def test_a_score_that_is_being_written_elsewhere_does_not_stop_the_run(tmp_path):
    case = Case(tmp_path, eval__place="external", eval__every=1)

    def half(call: str) -> None:
        if call == "publish 3":
            (tmp_path / "eval" / "step-000001.json").write_text('{"sco')

    case.trainer.on_call = half
    run = await case.go()
    assert [r["step"] for r in run.metrics()] == [1, 2, 3, 4, 5, 6]


async def test_trajectories_and_batches_of_forgotten_steps_are_forgotten(tmp_path):
    first = Case(tmp_path, run__keep_batches=True, checkpoint__every=2, eval__every=3)
    first.trainer.on_call = raise_at("publish 5", "killed")
    with pytest.raises(RuntimeError, match="killed"):
        await first.go()
    RunDirectory.reopen(tmp_path, first.config).release()
    steps = [f"step-{step:06d}" for step in (1, 2, 3, 4)]
    assert sorted(path.stem for path in (tmp_path / "batches").iterdir()) == steps
    kept = {name for name, _ in RunDirectory(tmp_path).trajectory_files()}
    assert kept == {*steps, "eval-000000", "eval-000003"}


def test_a_checkpoint_that_is_being_written_is_whole_before_later_steps_are_forgotten(tmp_path):
    """A trainer may die between its save and the end of the checkpoint, which another thread writes."""
    run = RunDirectory.create(tmp_path, configuration(tmp_path))
    for step in (1, 2):
        run.add_metrics({"step": step})
    saved, go_on = threading.Event(), threading.Event()

    def save(path):
        path.mkdir()
        saved.set()
        assert go_on.wait(10)

    writing = threading.Thread(target=run.save_checkpoint, args=(2, {}, save, 1))
    writing.start()
    assert saved.wait(10)
    rewinding = threading.Thread(target=run.rewind)
    rewinding.start()
    rewinding.join(0.2)
    go_on.set()
    rewinding.join(10)
    writing.join(10)
    assert list(run.checkpoints()) == [2]
    assert [r["step"] for r in run.metrics()] == [1, 2]
    run.release()


async def test_a_run_whose_log_probs_are_no_numbers_says_what_stopped_it_and_can_be_looked_at(tmp_path):
    case = Case(tmp_path, run__keep_trajectories=1)
    case.trainer._logprobs = lambda batch: [  # type: ignore[method-assign]
        np.full(len(row), np.nan, dtype=np.float32) for row in batch.tokens
    ]

    def stop(call: str) -> None:
        if call == "publish 2":
            raise UserError("The gradient norm is nan.")

    case.trainer.on_call = stop
    run = RunDirectory(tmp_path)
    with pytest.raises(UserError, match="norm is nan"), explained(run):
        await case.go()
    assert "not finite" in (tmp_path / "report.html").read_text()
    for view in ((), ("--table",)):
        shown = CliRunner().invoke(app, ["show", str(tmp_path), "--trajectory", "step-000001/0", *view])
        assert shown.exit_code == 0, shown.exception


def test_a_report_that_fails_does_not_hide_why_the_run_stopped(tmp_path):
    run = RunDirectory(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("[]\n")
    with pytest.raises(UserError, match="why"), explained(run):
        raise UserError("why")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_together_with_its_trainer_does_not_go_on(tmp_path, monkeypatch, number):
    """As a batch system does that signals all processes of a job."""
    case = Case(tmp_path, run__steps=10**6, checkpoint__every=10**6)
    run = RunDirectory.create(tmp_path, case.config)

    def dies() -> None:
        if case.world.ended > 20:
            os.kill(os.getpid(), number)
            raise TrainerGone("The trainer process was killed by SIGTERM")

    @asynccontextmanager
    async def parts(config, prepared, up):
        yield case.parts(dies)

    monkeypatch.setattr(training, "_parts", parts)
    nothing: Any = None
    progress = Progress(Console(file=io.StringIO()))
    case.world.duration = lambda number: 20
    with pytest.raises((KeyboardInterrupt, asyncio.CancelledError)), asyncio.Runner() as runner:
        runner.run(training._train(case.config, nothing, nothing, run, progress))
    assert case.world.running == 0
    run.release()


def test_nothing_that_was_left_over_is_trained_on_where_all_has_to_be_on_policy(tmp_path):
    config = configuration(tmp_path, run__driver="sync")
    exact = config.trainer.model_copy(update={"true_on_policy": True})
    assert BufferSettings.of(config).max_staleness == 3
    assert BufferSettings.of(config.model_copy(update={"trainer": exact})).max_staleness == 0


async def test_an_update_that_keeps_failing_ends_the_run_even_while_an_engine_waits_for_it(tmp_path):
    case = Case(tmp_path)
    failures = 0

    def no_room(call: str) -> None:
        nonlocal failures
        if call == "publish 2":
            failures += 1
            raise UserError("Weights could not be written.")

    async def waits() -> bool:
        return failures > 0

    case.trainer.on_call = no_room
    parts = case.parts
    case.parts = lambda check_health: replace(parts(check_health), mend=waits)  # type: ignore[method-assign]
    with pytest.raises(UserError, match="could not be written"):
        await case.go()
    assert failures < 20
