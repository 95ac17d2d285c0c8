"""The synchronous driver on a world in memory, and what both drivers owe a resumed run."""

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.trainer.test_asynchronous import Case, raise_at
from tests.trainer.worlds import failed, tasks
from titogym.trainer.runs.directory import RunDirectory


def synchronous(directory, **changes) -> Case:
    return Case(directory, **{"run__driver": "sync", "buffer__capacity": 9, **changes})


async def test_collects_trains_saves_updates_and_evaluates_in_turn(tmp_path, monkeypatch):
    case = synchronous(tmp_path, run__steps=4, checkpoint__every=2, eval__every=2)
    save = RunDirectory.save_checkpoint

    def recorded(run, step, *arguments):
        case.trainer.calls.append(f"save {step}")
        return save(run, step, *arguments)

    monkeypatch.setattr(RunDirectory, "save_checkpoint", recorded)
    await case.go()
    assert case.trainer.calls == [
        "publish 0",
        *("train_step", "publish 1", "train_step", "save 2", "publish 2"),
        *("train_step", "publish 3", "train_step", "publish 4", "save 4"),
        "save_hf",
    ]
    assert [e["version"] for e in RunDirectory(tmp_path).evaluations()] == [0, 2, 4]


async def test_no_episode_runs_while_the_trainer_works_and_nothing_is_stale(tmp_path):
    case = synchronous(tmp_path, run__steps=5)
    running: list[int] = []
    case.trainer.on_call = lambda call: running.append(case.world.running)
    run = await case.go()
    assert set(running) == {0}
    assert [r["staleness/old_max"] for r in run.metrics()] == [0] * 5
    assert all(r["logprobs/gap_mean"] < 1e-6 for r in run.metrics())
    assert case.world.started == 5 * 3 * 4  # not one episode more than trained on


async def test_learns_as_the_asynchronous_one_does(tmp_path):
    run = await synchronous(tmp_path, run__steps=25).go()
    before, after = run.evaluations()
    assert before["score"] == pytest.approx(0.25)
    assert after["score"] > 0.7


async def test_failed_and_filtered_groups_are_replaced(tmp_path):
    case = synchronous(tmp_path, buffer__filter="mixed_rewards", run__steps=3)
    case.world.break_episode = lambda n: failed(tasks(1)[0]) if n < 8 else None
    run = await case.go()
    assert [r["batch/groups"] for r in run.metrics()] == [3, 3, 3]
    assert all(r["reward/uniform_groups"] == 0 for r in run.metrics())
    assert run.metrics()[0]["buffer/failures"] == 2
    assert sum(r["buffer/filtered"] for r in run.metrics()) > 0


async def test_over_sampled_groups_are_aborted_and_collected_again(tmp_path):
    """Of four groups per step one is a hundred times as slow: the step does not wait for it."""
    case = synchronous(
        tmp_path, run__steps=4, rollout__over_sampling_groups=1, rollout__episodes_in_flight=16
    )
    case.world.duration = lambda number: 400 if 4 <= number < 8 else 1
    run = await case.go()
    groups = [label["group"] for label in case.world.labels]
    assert groups.count("1") == 8  # twice four members: aborted once, then collected
    assert case.world.running == 0
    settled = set(range(run.load_state(4)["ledger"]["cursor"])) - {
        index for index, _ in run.load_state(4)["ledger"]["owed"]
    }
    assert len(settled) == 12


async def test_old_log_probs_and_reference_reach_the_trainer_when_kl_is_in_the_reward(tmp_path):
    case = synchronous(tmp_path, run__steps=2, algorithm__kl="reward", algorithm__kl_coefficient=0.5)
    await case.go()
    for batch in case.trainer.batches:
        assert batch.old_logprobs is not None
        assert batch.reference_logprobs is not None
    second: Any = case.trainer.batches[1]
    np.testing.assert_allclose(second.reference_logprobs[0][3], np.log(0.25), rtol=1e-6)
    assert second.old_logprobs[0][3] != second.reference_logprobs[0][3]


async def test_ppo_takes_values_and_gives_returns(tmp_path):
    case = synchronous(tmp_path, run__steps=1, algorithm__advantage="gae")
    await case.go()
    batch: Any = case.trainer.batches[0]
    for tokens, values, advantages, returns in zip(
        batch.tokens, batch.values, batch.advantages, batch.returns, strict=True
    ):
        reward = float(tokens[3] == 3)
        np.testing.assert_allclose(returns[3:], [reward, reward], atol=1e-6)
        np.testing.assert_allclose(advantages[3:], reward - values[3:], atol=1e-6)


# --- resume ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["sync", "async"])
async def test_a_killed_run_resumes_at_its_checkpoint_and_trains_every_group_once(tmp_path, driver):
    first = synchronous(tmp_path, run__driver=driver)
    first.trainer.on_call = raise_at("publish 5", "killed")
    with pytest.raises(RuntimeError, match="killed"):
        await first.go()
    second = synchronous(tmp_path, run__driver=driver)
    run = await second.go(resume=True)
    assert [r["step"] for r in run.metrics()] == [1, 2, 3, 4, 5, 6]
    state = run.load_state(6)
    settled = set(range(state["ledger"]["cursor"])) - {index for index, _ in state["ledger"]["owed"]}
    fates = Counter(f for of in state["consumption"]["fates"].values() for f in Counter(of).elements())
    assert fates["trained"] == 6 * 3
    assert len(settled) == fates.total()  # every group that is not owed met one fate


async def test_groups_that_waited_in_the_buffer_are_trained_on_after_a_restart(tmp_path):
    """They are not collected again, whatever it cost to make them."""
    first = Case(tmp_path, run__steps=2, checkpoint__every=2)

    def slow_at_the_end(call: str) -> None:
        if call == "publish 2":  # the buffer fills up meanwhile
            time.sleep(0.2)

    first.trainer.on_call = slow_at_the_end
    run = await first.go()
    held = run.load_groups(2)
    assert held
    second = Case(tmp_path, run__steps=4)
    await second.go(resume=True)
    collected = {label["group"] for label in second.world.labels}
    assert not collected & {str(group.index) for group in held}
    trained = [list(tokens) for tokens in second.trainer.batches[0].tokens]
    assert trained[:4] == [sample.tokens for sample in held[0].samples]
