"""Waiting in time: no group becomes too old, whatever takes how long."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.test_asynchronous import Case
from titogym.trainer.rollout.deadlines import must_wait


def test_a_group_at_its_last_chance_is_waited_for():
    assert must_wait([5.0, 5.0], [3], version=5, limit=2, per_step=2)
    assert not must_wait([5.0, 5.0], [4], version=5, limit=2, per_step=2)
    assert not must_wait([3.0, 5.0], [5], version=5, limit=2, per_step=2)


def test_of_more_groups_than_one_step_takes_some_are_waited_for_a_step_ahead():
    assert must_wait([5.0, 5.0], [4, 4, 4], version=5, limit=2, per_step=2)  # next step has room for two
    assert not must_wait([4.0, 5.0], [4, 4], version=5, limit=2, per_step=2)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 10**6))
@settings(max_examples=100)
def test_none_is_ever_too_old_and_training_always_goes_on(limit, per_step, seed):
    """Any order of starts, ends and steps with at most `per_step * limit` groups under way or waiting."""
    rng = random.Random(seed)
    version, steps = 0, 0
    under_way: list[int] = []
    finished: list[float] = []
    for _ in range(400):
        action = rng.random()
        if action < 0.4 and len(under_way) + len(finished) < per_step * limit:
            under_way.append(version)
        elif action < 0.7 and under_way:
            place = 0 if rng.random() < 0.1 else rng.randrange(len(under_way))
            finished.append(under_way.pop(place))
        elif len(finished) >= per_step and not must_wait(finished, under_way, version, limit, per_step):
            finished.sort()
            assert version - finished[0] <= limit
            del finished[:per_step]
            version, steps = version + 1, steps + 1
        if not under_way and len(finished) >= per_step:
            assert not must_wait(finished, under_way, version, limit, per_step)
    assert steps > 0


@pytest.mark.parametrize("wait", [False, True])
async def test_a_task_that_always_takes_long_is_trained_on_like_the_others(tmp_path, wait):
    """Without waiting it starves: see the same task in `test_records_on_disk`."""
    case = Case(
        tmp_path,
        run__steps=30,
        buffer__capacity=3,
        buffer__max_staleness=2,
        buffer__on_stale="wait" if wait else "drop",
    )
    run_episode = case.world.run_episode

    async def slow_task(task, labels):
        result = await run_episode(task, labels)
        await asyncio.sleep(0.06 if task.id == "train-3" else 0)
        return result

    setattr(case.world, "run_episode", slow_task)  # noqa: B010 (typed code may not do this)
    run = await case.go()
    stale = sum(record["buffer/stale"] for record in run.metrics())
    assert (stale == 0) == wait
    assert max(record["staleness/old_max"] for record in run.metrics()) <= 2
    if wait:
        assert run.metrics()[-1]["consumption/duration_bias"] == 1.0
        assert run.events() == []
