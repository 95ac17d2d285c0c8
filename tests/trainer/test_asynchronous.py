"""The asynchronous driver on a world in memory: order of events, learning, failure, resume, clean-up."""

import asyncio
import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.trainer.worlds import ACTIONS, MemoryTrainer, World, failed, softmax, tasks
from titogym.errors import UserError
from titogym.trainer.config.file import parse_config
from titogym.trainer.config.sections import RunConfig
from titogym.trainer.drivers import DRIVERS
from titogym.trainer.drivers.parts import Parts
from titogym.trainer.runs.directory import RunDirectory
from titogym.trainer.runs.progress import Progress


def configuration(directory: Path, **changes) -> RunConfig:
    data: dict[str, dict[str, Any]] = {
        "run": {"dir": str(directory), "steps": 6, "keep_trajectories": 3},
        "model": {"dir": "unused"},
        "environment": {"source": "memory"},
        "rollout": {"samples_per_prompt": 4, "groups_per_step": 3, "episodes_in_flight": 12},
        "buffer": {"capacity": 4, "max_staleness": 3},
        "algorithm": {},
        "checkpoint": {"every": 2, "keep": 2},
        "eval": {"split": "test"},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        data[section][name] = value
    return parse_config(data)


def parts_of(world: World, trainer: MemoryTrainer, check_health=lambda: None) -> Parts:
    return Parts(
        trainer=trainer,
        run_episode=world.run_episode,
        run_eval_episode=world.run_eval_episode,
        tasks=tasks(5),
        eval_tasks=tasks(4, "test"),
        token_text=lambda token: f"<{token}>",
        check_health=check_health,
    )


def raise_at(call: str, message: str) -> Callable[[str], None]:
    def hook(made: str) -> None:
        if made == call:
            raise RuntimeError(message)

    return hook


class Case:
    """One run in `directory`; `go` trains it from the start or, with `resume`, from its last checkpoint."""

    def __init__(self, directory: Path, **changes) -> None:
        self.config = configuration(directory, **changes)
        self.directory = directory
        self.world = World()
        self.trainer = MemoryTrainer(self.world)
        self.output = io.StringIO()

    def parts(self, check_health: Callable[[], None]) -> Parts:
        return parts_of(self.world, self.trainer, check_health)

    async def go(self, *, resume: bool = False, check_health=lambda: None) -> RunDirectory:
        run = (RunDirectory.reopen if resume else RunDirectory.create)(self.directory, self.config)
        try:
            if resume and run.checkpoints():
                self.trainer.load(list(run.checkpoints().values())[-1] / "trainer")
            progress = Progress(Console(file=self.output, width=200))
            make = DRIVERS[self.config.run.driver]
            driver = make(self.config, self.parts(check_health), run, progress)
            await asyncio.wait_for(driver.to_the_end(), 60)
            return run
        finally:
            run.release()


async def test_publishes_before_the_first_token_and_after_every_step(tmp_path):
    case = Case(tmp_path)
    await case.go()
    calls = case.trainer.calls
    assert calls[0] == "publish 0"
    assert calls == [
        "publish 0",
        *(c for step in range(1, 7) for c in ("train_step", f"publish {step}")),
        "save_hf",
    ]
    assert "default" not in {
        span[2] for _, r in RunDirectory(tmp_path).trajectories() for span in r["version_spans"]
    }


async def test_learns_and_reports_it(tmp_path):
    case = Case(tmp_path, run__steps=25)
    run = await case.go()
    before, after = run.evaluations()
    assert (before["version"], after["version"]) == (0, 25)
    assert before["score"] == pytest.approx(1 / ACTIONS)
    assert after["score"] > 0.7
    assert after["versions"] == ["25"]
    np.testing.assert_array_equal(np.load(run.model / "logits.npy"), case.trainer.logits)
    assert softmax(case.trainer.logits)[-1] == pytest.approx(after["score"])


async def test_every_step_leaves_one_complete_record(tmp_path):
    case = Case(tmp_path)
    run = await case.go()
    records = run.metrics()
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    for record in records:
        assert record["batch/groups"] == 3
        assert record["batch/samples"] == 12
        assert record["batch/tokens"] == 24
        assert 0 <= record["staleness/old_mean"] <= record["staleness/old_max"] <= 3
        assert record["staleness/coverage"] == 1.0
        assert record["bottleneck"] in ("rollout", "trainer", "balanced")
        assert record["time/step"] >= record["time/train"] + record["time/publish"]
        assert record["logprobs/gap_mean"] >= 0
    text = case.output.getvalue()
    assert text.count("held-out reward") == 2
    assert len([line for line in text.splitlines() if line.strip()[:1].isdigit()]) == 6


async def test_log_prob_gap_is_zero_exactly_where_nothing_is_stale(tmp_path):
    case = Case(tmp_path, buffer__max_staleness=0, run__steps=4)
    run = await case.go()
    for record in run.metrics():
        assert record["staleness/old_max"] == 0
        assert record["logprobs/gap_mean"] < 1e-6


async def test_advantages_and_rewards_reach_the_trainer_in_whole_groups(tmp_path):
    case = Case(tmp_path)
    await case.go()
    for batch in case.trainer.batches:
        assert len(batch) == 12
        for start in range(0, 12, 4):
            actions = [int(tokens[3]) for tokens in batch.tokens[start : start + 4]]
            rewards = np.array([float(a == ACTIONS - 1) for a in actions])
            expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            got = [float(a[3]) for a in batch.advantages[start : start + 4]]
            np.testing.assert_allclose(got, expected, atol=1e-5)


async def test_kept_trajectories_show_engine_and_trainer_side_by_side(tmp_path):
    run = await Case(tmp_path).go()
    kept = dict(run.trajectories())
    assert {f"step-{step:06d}/{i}" for step in range(1, 7) for i in range(3)} <= kept.keys()
    assert {f"eval-{version:06d}/{i}" for version in (0, 6) for i in range(3)} <= kept.keys()
    record = kept["step-000001/0"]
    assert record["texts"][:4] == ["<90>", "<91>", "<92>", f"<{record['tokens'][3]}>"]
    assert record["trainer_logprobs"][3] == pytest.approx(
        record["logprobs"][3], abs=1e-6
    )  # version 0 sampled it
    assert len({kept[f"step-000001/{i}"]["group"] for i in range(3)}) == 3  # spread over the groups


async def test_held_out_evaluation_in_between_is_attributed_to_its_weights(tmp_path):
    run = await Case(tmp_path, eval__every=2).go()
    assert [(e["version"], e["versions"]) for e in run.evaluations()] == [(v, [str(v)]) for v in (0, 2, 4, 6)]


async def test_skewed_episodes_do_not_hold_up_the_others(tmp_path):
    """One episode in eight is a hundred times as long: steps go on, and what is dropped is reported."""
    case = Case(tmp_path, run__steps=12, buffer__max_staleness=2)
    case.world.duration = lambda number: 100 if number % 8 == 0 else 1
    run = await case.go()
    assert len(run.metrics()) == 12
    assert max(r["staleness/old_max"] for r in run.metrics()) <= 2
    dropped = [e for e in run.events() if e["kind"] == "group_dropped"]
    assert sum(r["buffer/dropped"] for r in run.metrics()) == len(dropped)


async def test_stale_groups_are_retried_within_bounds(tmp_path):
    case = Case(
        tmp_path, run__steps=12, buffer__max_staleness=0, buffer__on_stale="retry", buffer__max_retries=1
    )
    run = await case.go()
    attempts = [int(label["attempt"]) for label in case.world.labels]
    assert max(attempts) == 1
    assert sum(r["buffer/retried"] for r in run.metrics()) > 0
    assert all(e["attempts"] == 2 for e in run.events() if e["kind"] == "group_dropped")


# --- failure -----------------------------------------------------------------------------------------


async def test_failed_episodes_are_recorded_by_cause_and_the_run_goes_on(tmp_path):
    case = Case(tmp_path)
    case.world.break_episode = lambda n: (
        failed(tasks(1)[0], "grading_error", "No tests.") if n % 5 == 0 else None
    )
    run = await case.go()
    failures = [e for e in run.events() if e["kind"] == "episode_failed"]
    assert failures
    assert {(e["cause"], e["error"]) for e in failures} == {("grading_error", "No tests.")}
    assert len(run.metrics()) == 6


async def test_the_steps_together_count_what_ended_between_them_too(tmp_path):
    """Evaluation and checkpoint are no part of a step, and episodes end meanwhile."""
    case = Case(tmp_path, run__steps=12, eval__every=1, checkpoint__every=1, buffer__filter="mixed_rewards")
    case.world.break_episode = lambda n: failed(tasks(1)[0], "crashed") if n % 5 == 0 else None
    run = await case.go()
    told = Counter(event["kind"] for event in run.events())
    records = run.metrics()
    failures = sum(r["rollout/failed"] for r in records)
    assert failures == sum(r["failures"].get("crashed", 0) for r in records)
    # What is in flight when the last step is over may still come to an end.
    assert told["episode_failed"] - 12 <= failures <= told["episode_failed"]
    dropped = sum(r["buffer/dropped"] for r in records)
    assert told["group_dropped"] - 3 <= dropped <= told["group_dropped"]


async def test_a_dead_engine_stops_the_run_with_one_sentence_and_no_episode_left(tmp_path):
    case = Case(tmp_path)
    case.world.break_episode = lambda n: failed(tasks(1)[0]) if n > 30 else None
    with pytest.raises(UserError, match=r"64 episodes in a row failed .*The engine is gone"):
        await case.go()
    assert case.world.running == 0


async def test_a_dead_process_is_noticed_while_the_trainer_is_stuck(tmp_path):
    case = Case(tmp_path)

    def check_health() -> None:
        if case.world.ended:
            raise UserError("The engine stopped with status -9.")

    case.world.duration = lambda number: 10**6 if number else 1
    with pytest.raises(UserError, match="status -9"):
        await case.go(check_health=check_health)
    assert case.world.running == 0


async def test_an_error_of_the_trainer_ends_the_run_and_every_episode(tmp_path):
    case = Case(tmp_path)
    case.trainer.on_call = raise_at("train_step", "loss is not finite")
    with pytest.raises(RuntimeError, match="not finite"):
        await case.go()
    assert case.world.running == 0


async def test_cancelling_the_run_cancels_every_episode(tmp_path):
    case = Case(tmp_path)
    started = asyncio.Event()

    def endless(number: int) -> int:
        started.set()
        return 10**6

    case.world.duration = endless
    running = asyncio.create_task(case.go())
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert case.world.running == 0


# --- resume ------------------------------------------------------------------------------------------


async def test_a_resumed_run_has_every_step_once_and_trains_every_group_once(tmp_path):
    first = Case(tmp_path)
    first.trainer.on_call = raise_at("publish 5", "killed")
    with pytest.raises(RuntimeError, match="killed"):
        await first.go()
    assert max(RunDirectory(tmp_path).checkpoints()) == 4

    second = Case(tmp_path)
    run = await second.go(resume=True)
    assert second.trainer.calls[0] == "publish 4"
    assert [r["step"] for r in run.metrics()] == [1, 2, 3, 4, 5, 6]
    assert [e["version"] for e in run.evaluations()] == [0, 6]
    owed = {index for index, _ in run.load_state(6)["ledger"]["owed"]}
    cursor = run.load_state(6)["ledger"]["cursor"]
    assert len(set(range(cursor)) - owed) == 6 * 3  # settled: exactly the groups of six steps


async def test_resuming_a_run_without_a_checkpoint_starts_it_again(tmp_path):
    first = Case(tmp_path)
    first.trainer.on_call = raise_at("train_step", "killed")
    with pytest.raises(RuntimeError, match="killed"):
        await first.go()
    second = Case(tmp_path)
    run = await second.go(resume=True)
    assert [r["step"] for r in run.metrics()] == [1, 2, 3, 4, 5, 6]
    assert [e["version"] for e in run.evaluations()] == [0, 6]


async def test_resuming_a_finished_run_changes_nothing_but_can_be_made_longer(tmp_path):
    run = await Case(tmp_path).go()
    before = run.metrics()
    again = Case(tmp_path)
    await again.go(resume=True)
    assert run.metrics() == before
    assert len(run.evaluations()) == 2
    longer = Case(tmp_path, run__steps=8)
    await longer.go(resume=True)
    assert [r["step"] for r in run.metrics()] == list(range(1, 9))


def test_a_second_run_in_the_same_directory_is_refused(tmp_path):
    config = configuration(tmp_path)
    run = RunDirectory.create(tmp_path, config)
    with pytest.raises(UserError, match="in use by another process"):
        RunDirectory.create(tmp_path, config)
    run.add_metrics({"step": 1})
    run.release()
    with pytest.raises(UserError, match="already holds a run"):
        RunDirectory.create(tmp_path, config)


def test_a_checkpoint_cut_short_is_not_a_checkpoint(tmp_path):
    run = RunDirectory.create(tmp_path, configuration(tmp_path))
    run.save_checkpoint(2, {"ledger": {}}, lambda path: path.mkdir(), keep=1)

    def killed(path):
        path.mkdir()
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        run.save_checkpoint(4, {"ledger": {}}, killed, keep=1)
    assert list(run.checkpoints()) == [2]
    run.save_checkpoint(4, {"ledger": {}}, lambda path: path.mkdir(), keep=1)
    assert list(run.checkpoints()) == [4]


def test_a_metrics_line_cut_short_by_a_kill_is_forgotten(tmp_path):
    config = configuration(tmp_path)
    run = RunDirectory.create(tmp_path, config)
    run.save_checkpoint(2, {"ledger": {}}, lambda path: path.mkdir(), keep=1)
    for step in (1, 2, 3):
        run.add_metrics({"step": step})
    with run.metrics_path.open("ab") as out:
        out.write(b'{"step": 4, "rew')
    run.release()
    again = RunDirectory.reopen(tmp_path, config)
    again.add_metrics({"step": 3})
    assert [r["step"] for r in again.metrics()] == [1, 2, 3]


async def test_several_updates_per_step_share_the_old_log_probs_and_cover_the_batch(tmp_path):
    case = Case(tmp_path, run__steps=2, algorithm__minibatches=2)
    await case.go()
    assert [len(b) for b in case.trainer.batches] == [4, 8, 4, 8]
    assert [len(scored) for scored in case.trainer.scored] == [12, 12]
    for step in range(2):
        updates = case.trainer.batches[2 * step : 2 * step + 2]
        old = [array for update in updates for array in update.old_logprobs or []]
        for got, expected in zip(old, case.trainer.scored[step], strict=True):
            np.testing.assert_array_equal(got, expected)
