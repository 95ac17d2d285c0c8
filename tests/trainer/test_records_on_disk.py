"""Groups on disk, who is trained on by duration, the bottleneck's name, and figures for other programs."""

import asyncio
import json
import math
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.test_asynchronous import Case
from tests.trainer.worlds import episode, tasks
from titogym.errors import UserError
from titogym.trainer.batch import Group, Sample
from titogym.trainer.evaluation import summarise
from titogym.trainer.rollout.consumption import BUCKETS, STARVED_AFTER, Consumption
from titogym.trainer.runs.directory import RunDirectory
from titogym.trainer.runs.metrics import MEANINGS, batch_figures, bottleneck, over_updates
from titogym.trainer.runs.storage import read_groups, write_groups
from titogym.trainer.runs.trackers import TensorBoardTracker, figures, prometheus_text

# --- groups on disk ----------------------------------------------------------------------------------

short = st.text(max_size=4)
spans = st.tuples(st.integers(0, 3), st.integers(3, 6), short)
samples = st.integers(1, 6).flatmap(
    lambda n: st.builds(
        Sample,
        tokens=st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n),
        loss_mask=st.lists(st.integers(0, 1), min_size=n, max_size=n),
        logprobs=st.lists(st.floats(-50, 0), min_size=n, max_size=n),
        version_spans=st.lists(spans, max_size=3),
        reward=st.floats(-1e6, 1e6),
        episode=st.integers(0, 9),
        metadata=st.dictionaries(short, st.integers(-(2**53), 2**53) | short, max_size=2),
    )
)
groups_of_samples = st.lists(
    st.builds(
        Group,
        task_id=st.text(min_size=1, max_size=6),
        samples=st.lists(samples, max_size=3),
        index=st.integers(0, 10**6),
        attempt=st.integers(0, 3),
        failures=st.lists(st.sampled_from(["timeout", "crashed"]), max_size=2),
        metadata=st.just({"seconds": 1.5}),
    ),
    max_size=3,
)


@given(groups_of_samples)
@settings(max_examples=30)
def test_groups_come_back_from_disk_as_they_were(tmp_path_factory, groups):
    path = tmp_path_factory.mktemp("groups") / "groups.safetensors"
    write_groups(path, groups)
    assert read_groups(path) == groups


def test_arrays_of_a_sample_are_kept_in_their_own_type(tmp_path):
    routes = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    group = Group("t", [Sample([1, 2, 3], [0, 1, 1], [0.0, -1.0, -2.0], [], 1.0, routes=routes)])
    write_groups(tmp_path / "g", [group], {"advantages": [np.array([0, 1, 1], dtype=np.float32)]})
    back = read_groups(tmp_path / "g")[0].samples[0].routes
    assert back is not None
    assert back.dtype == np.uint8
    np.testing.assert_array_equal(back, routes)


@pytest.mark.parametrize("content", [b"", b"\0" * 40, b"{}"])
def test_a_damaged_file_of_groups_is_named(tmp_path, content):
    (tmp_path / "groups.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"groups\.safetensors is damaged"):
        read_groups(tmp_path / "groups.safetensors")


def test_groups_for_which_there_is_no_room_are_an_error_of_the_file(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    group = Group("t", [Sample([1] * 9999, [1] * 9999, [0.0] * 9999, [], 1.0)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_groups(tmp_path / "g", [group])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


async def test_everything_that_a_step_trained_on_can_be_kept(tmp_path):
    run = await Case(tmp_path, run__keep_batches=True, run__steps=2).go()
    groups = read_groups(run.batch_path(2))
    assert [len(group.samples) for group in groups] == [4, 4, 4]
    rewards = [sample.reward for group in groups for sample in group.samples]
    assert sum(rewards) / 12 == pytest.approx(run.metrics()[1]["reward/mean"])


# --- who is trained on -------------------------------------------------------------------------------


def lasting(seconds: float, task: str = "t") -> Group:
    return Group(task, [], metadata={"seconds": seconds})


def test_duration_bias_tells_that_long_tasks_are_left_out():
    consumption = Consumption()
    assert consumption.duration_bias() is None
    for _ in range(9):
        consumption.settle(lasting(1.0), "trained")
    consumption.settle(lasting(91.0), "trained")
    assert consumption.duration_bias() == 1.0
    consumption.settle(lasting(100.0), "stale")
    assert consumption.duration_bias() == pytest.approx(10.0 / (200.0 / 11))
    assert consumption.table() == {"1-4 s": {"trained": 9}, "64-256 s": {"trained": 1, "stale": 1}}


def test_a_task_starves_when_it_is_stale_again_and_again_and_never_trained():
    consumption = Consumption()
    told = [consumption.settle(lasting(9.0, "slow"), "stale") for _ in range(STARVED_AFTER + 2)]
    assert told == [False] * (STARVED_AFTER - 1) + [True, False, False]
    assert consumption.starved == ["slow"]
    again = Consumption(json.loads(json.dumps(consumption.state())))
    assert again.starved == ["slow"]
    assert again.table() == consumption.table()
    again.settle(lasting(9.0, "slow"), "trained")
    assert again.starved == []
    assert not any(again.settle(lasting(9.0, "slow"), "stale") for _ in range(5))


@given(st.floats(0, 1e5))
def test_every_duration_has_a_bucket(seconds):
    consumption = Consumption()
    consumption.settle(lasting(seconds), "trained")
    assert set(consumption.table()) <= set(BUCKETS)


async def test_a_task_that_takes_longer_than_the_limit_is_told_to_starve(tmp_path):
    """One of five tasks always outlasts two weight updates, where one is the most that is allowed."""
    case = Case(tmp_path, run__steps=40, buffer__max_staleness=1, rollout__episodes_in_flight=40)
    run_episode, engine = case.world.run_episode, case.world.engine

    async def slow_task(task, labels):
        result = await run_episode(task, labels)
        sampled_at = int(result.trajectories[0].version_spans[0][2])
        while task.id == "train-3" and int(engine.version) < sampled_at + 2:  # noqa: ASYNC110 (tells nobody)
            await asyncio.sleep(0.05)
        return result

    setattr(case.world, "run_episode", slow_task)  # noqa: B010 (typed code may not do this)
    run = await case.go()
    starved = [e["task"] for e in run.events() if e["kind"] == "task_starved"]
    last = run.metrics()[-1]
    assert starved == ["train-3"]
    assert last["consumption/duration_bias"] < 0.9


# --- a step's record ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wait", "blocked", "stale", "expected", "why"),
    [
        (5.0, 0.0, 0, "rollout", "queue near zero"),
        (0.2, 3.0, 1, "trainer", "queue at capacity"),
        (5.0, 0.0, 4, "staleness", "too old"),
        (0.2, 0.3, 0, "balanced", "neither side"),
    ],
)
def test_the_bottleneck_is_named_with_its_evidence(wait, blocked, stale, expected, why):
    step = {"time/wait": wait, "time/rollout_blocked": blocked, "time/step": 10.0}
    got = bottleneck({**step, "buffer/stale": stale, "buffer/size": 2}, groups_per_step=4, capacity=8)
    assert got["bottleneck"] == expected
    assert why in got["bottleneck_why"]


def test_groups_without_versions_have_no_age_and_none_is_made_up():
    def group(version: str) -> Group:
        return Group("t", [Sample([1, 2], [0, 1], [0.0, -1.0], [(1, 2, version)], 1.0)])

    aged = batch_figures([group("3"), group("default")], version=5)
    assert aged["staleness/old_mean"] == 2
    assert aged["staleness/coverage"] == 0.5
    assert "staleness/old_mean" not in batch_figures([group("default")], version=5)


def test_figures_of_several_updates_are_joined_by_kind():
    one = {"loss/ratio_max": 1.0, "loss/tokens": 4.0, "logprobs/mean": -1.0, "tis/histogram/2": 3.0}
    two = {"loss/ratio_max": 2.0, "loss/tokens": 6.0, "logprobs/mean": -3.0, "tis/histogram/2": 1.0}
    joined = {"loss/ratio_max": 2.0, "loss/tokens": 10.0, "logprobs/mean": -2.2, "tis/histogram/2": 4.0}
    assert over_updates([one, two]) == pytest.approx(joined)


def test_a_bucket_without_tokens_does_not_thin_out_the_mean_of_the_others():
    one = {"loss/tokens": 4.0, "tis/lag_1/tokens": 0.0, "tis/lag_1/k3": 0.0}
    two = {"loss/tokens": 6.0, "tis/lag_1/tokens": 3.0, "tis/lag_1/k3": 0.5}
    assert over_updates([one, two])["tis/lag_1/k3"] == 0.5


async def test_every_figure_of_a_step_has_a_meaning(tmp_path):
    run = await Case(tmp_path, run__steps=2).go()
    for record in run.metrics():
        assert {name for name in record if "/" in name} <= MEANINGS.keys()
        assert record["bottleneck_why"]
    slowest = [episode for record in run.metrics() for episode in record["slowest"]]
    assert 1 <= len(slowest) <= 10
    assert {episode["task"] for episode in slowest} <= {f"train-{number}" for number in range(5)}
    for record in run.metrics():
        assert sum(record["consumption"]["under 1 s"].values()) >= 3


@pytest.mark.parametrize("line", ['{"reward/mean": 1}', '{"step": "two"}', '{"step": null}', "[]", "3"])
def test_a_record_without_its_step_is_named_on_resume(tmp_path, line):
    run = RunDirectory(tmp_path)
    case = Case(tmp_path)
    RunDirectory.create(tmp_path, case.config).release()
    run.metrics_path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: no whole number 'step'"):
        RunDirectory.reopen(tmp_path, case.config)


async def test_a_run_directory_says_what_it_was_made_with(tmp_path):
    run = await Case(tmp_path, run__steps=1).go()
    versions = json.loads((run.path / "versions.json").read_text())
    assert versions["titogym"]
    assert versions["numpy"] == np.__version__


# --- other programs ----------------------------------------------------------------------------------

RECORD: dict[str, Any] = {
    "step": 3,
    "time": 1.0,
    "bottleneck": "rollout",
    "reward/mean": 0.5,
    "loss/policy": math.nan,
    "tis/lag_0/k3": 1e-6,
}


def test_figures_are_the_finite_numbers_with_a_name():
    assert dict(figures(RECORD)) == {"reward/mean": 0.5, "tis/lag_0/k3": 1e-6}


def test_prometheus_has_the_last_step_under_names_that_it_can_read():
    text = prometheus_text(RECORD, MEANINGS)
    assert "titogym_step 3\n" in text
    assert f"# HELP titogym_reward_mean {MEANINGS['reward/mean']}\n" in text
    assert "# TYPE titogym_reward_mean gauge\ntitogym_reward_mean 0.5\n" in text
    assert "titogym_tis_lag_0_k3 1e-06\n" in text
    assert prometheus_text(None, MEANINGS) == "# TYPE titogym_step gauge\ntitogym_step 0\n"


def test_tensorboard_has_every_step_and_late_scores_at_their_own(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path)
    for step in (1, 2, 3):
        tracker.step({**RECORD, "step": step, "reward/mean": step / 4})
    tracker.evaluation(summarise([episode(tasks(1)[0], 3, version="2")], version=2))
    tracker.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [(e.step, e.value) for e in read.Scalars("eval/score")] == [(2, 1.0)]


@pytest.mark.parametrize("again_from", [0, 1])
def test_tensorboard_forgets_the_steps_that_a_resumed_run_takes_again(tmp_path, again_from):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed, steps, reward in ((0, (1, 2, 3), 0.25), (again_from, range(again_from + 1, 5), 0.75)):
        tracker = TensorBoardTracker(tmp_path, resumed)
        for step in steps:
            tracker.step({**RECORD, "step": step, "reward/mean": reward})
        tracker.close()
        time.sleep(1.1)  # TensorBoard orders files by the second that they were made in
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("reward/mean")] == [
        (1, 0.25 if again_from else 0.75),
        (2, 0.75),
        (3, 0.75),
        (4, 0.75),
    ]


def test_wandb_writes_an_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from titogym.trainer.runs.trackers import WandbTracker

    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "own"))
    tracker = WandbTracker(tmp_path, "titogym", {"run": {"steps": 3}})
    scores = [0.0625, 0.125, 0.25]
    for version, score in enumerate(scores[:2]):
        result = episode(tasks(1)[0], 3, version=str(version), reward=score)
        tracker.evaluation(summarise([result], version))
    tracker.step({**RECORD, "step": 1, "reward/mean": 0.71875})
    tracker.step({**RECORD, "step": 2, "reward/mean": 0.84375})
    tracker.evaluation(summarise([episode(tasks(1)[0], 3, version="2", reward=scores[2])], 2))
    tracker.close()
    written = [b"reward/mean", b"0.71875", b"0.84375", *(str(score).encode() for score in scores)]
    (log,) = Path(tmp_path).glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 20  # W&B's own process writes it
    while not all(word in log.read_bytes() for word in written) and time.monotonic() < deadline:
        time.sleep(0.1)
    content = log.read_bytes()
    assert [word for word in written if word not in content] == []  # W&B ignores steps that go back
