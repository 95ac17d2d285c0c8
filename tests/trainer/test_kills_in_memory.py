"""Runs that are killed at random calls and resumed: every step once, every group at most once, none lost."""

import random
from contextlib import suppress

import pytest

from tests.trainer.accounts import assert_groups_accounted_for
from tests.trainer.test_asynchronous import Case, raise_at
from titogym.trainer.batch import Group
from titogym.trainer.rollout.buffer import GroupBuffer
from titogym.trainer.runs.storage import read_groups

STEPS = 6
CALLS = [f"publish {step}" for step in range(STEPS + 1)] + ["train_step", "save_hf"]


def case_of(directory, driver: str, rng: random.Random) -> Case:
    case = Case(
        directory,
        run__driver=driver,
        run__steps=STEPS,
        run__keep_batches=True,
        buffer__capacity=rng.choice((3, 6)),
        buffer__on_stale=rng.choice(("drop", "retry", "wait") if driver == "async" else ("drop", "retry")),
        buffer__max_staleness=rng.choice((1, 2, 3)),
        checkpoint__every=rng.choice((1, 2, 4)),
        rollout__over_sampling=1,
        rollout__episodes_in_flight=15,
    )
    case.world.seed = rng.randrange(100)
    case.world.duration = lambda number: rng.choice((0, 1, 1, 12))
    return case


@pytest.mark.parametrize("driver", ["sync", "async"])
@pytest.mark.parametrize("seed", range(6))
async def test_killed_twice_at_random_moments(tmp_path, driver, seed):
    rng = random.Random(f"{driver}/{seed}")
    for attempt in range(2):
        case = case_of(tmp_path, driver, rng)
        case.trainer.on_call = raise_at(rng.choice(CALLS), "killed")
        with suppress(RuntimeError):  # the second run may be past that call already
            await case.go(resume=attempt > 0)
            assert attempt > 0
    run = await case_of(tmp_path, driver, rng).go(resume=True)
    assert len(run.metrics()) == STEPS
    assert_groups_accounted_for(run, per_step=3)


class NewestFirst(GroupBuffer):
    """A user's own buffer: the latest groups are taken first."""

    async def take(self, count: int) -> list[Group]:
        groups = await super().take(count)
        return groups[::-1]


async def test_a_buffer_of_ones_own_is_found_by_dotted_path(tmp_path):
    implementation = "tests.trainer.test_kills_in_memory:NewestFirst"
    run = await Case(
        tmp_path, run__driver="sync", buffer__implementation=implementation, run__keep_batches=True
    ).go()
    places = [group.index for group in read_groups(run.batch_path(1))]
    assert places == sorted(places, reverse=True)
