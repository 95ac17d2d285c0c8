"""The rollout worker and its ledger: places, groups, failures, cancellation."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.worlds import World, episode, failed, tasks
from titogym.envs.task import Task
from titogym.errors import UserError
from titogym.harnesses.episode import EpisodeResult
from titogym.trainer.batch import Group
from titogym.trainer.rollout.buffer import BufferSettings, GroupBuffer
from titogym.trainer.rollout.ledger import TaskLedger, TaskOrder
from titogym.trainer.rollout.worker import RolloutSettings, RolloutWorker, failure_cause, samples_of


def buffer_of(capacity: int, max_staleness: int = 9) -> GroupBuffer:
    return GroupBuffer(BufferSettings(capacity=capacity, max_staleness=max_staleness, min_episodes=2))


def worker_for(
    run_episode, buffer, *, ledger=None, samples=2, in_flight=4, failures=8, on_episode=None, **settings
):
    return RolloutWorker(
        RolloutSettings(samples, in_flight, failures, **settings),
        ledger=ledger or TaskLedger(TaskOrder(tasks(5), seed=0)),
        buffer=buffer,
        run_episode=run_episode,
        **({"on_episode": on_episode} if on_episode else {}),
    )


class running:
    """Runs a worker while the block runs; then cancels it and waits."""

    def __init__(self, worker: RolloutWorker) -> None:
        self.worker = worker

    async def __aenter__(self) -> RolloutWorker:
        self.task = asyncio.create_task(self.worker.run())
        return self.worker

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


# --- task order and ledger ---------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(0, 3), st.lists(st.integers(0, 60), max_size=10))
def test_every_epoch_is_a_permutation_whatever_the_order_of_access(count, seed, places):
    order, other = TaskOrder(tasks(count), seed), TaskOrder(tasks(count), seed)
    straight = [order[i].id for i in range(60 + count)]
    assert [other[place].id for place in places] == [straight[place] for place in places]
    for epoch in range(60 // count):
        assert sorted(straight[epoch * count : (epoch + 1) * count]) == sorted(t.id for t in tasks(count))


def test_seeds_give_other_orders():
    assert [TaskOrder(tasks(20), 0)[i].id for i in range(20)] != [
        TaskOrder(tasks(20), 1)[i].id for i in range(20)
    ]


def test_no_tasks_is_a_user_error():
    with pytest.raises(UserError, match=r"environment\.source"):
        TaskOrder([], 0)


ledger_script = st.lists(st.sampled_from(["next", "settle", "retry", "restart"]), max_size=60)


@given(ledger_script, st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_a_restart_at_any_point_loses_and_doubles_no_group(script, rng):
    """Whatever was owed when the state was taken is collected again; whatever was settled never is."""
    order = TaskOrder(tasks(3), 0)
    ledger = TaskLedger(order)
    running: dict[int, Group] = {}
    settled: list[int] = []
    for operation in script:
        if operation == "next":
            assignment = ledger.next()
            assert assignment.index not in running
            assert assignment.index not in settled
            assert assignment.task == order[assignment.index]
            running[assignment.index] = Group("t", [], assignment.index, assignment.attempt)
        elif operation == "restart":
            ledger = TaskLedger(order, ledger.state())
            running.clear()
        elif running:
            group = running.pop(rng.choice(sorted(running)))
            if operation == "settle":
                ledger.settle(group.index)
                settled.append(group.index)
            else:
                group.attempt += 1
                ledger.retry(group)
    collected = [ledger.next().index for _ in range(len(script) + 1)]
    expected = [i for i in range(max(collected) + 1) if i not in settled and i not in running]
    assert sorted(collected) == expected
    assert len(settled) == len(set(settled))


def test_groups_in_a_restored_buffer_are_owed_but_not_collected_again():
    order = TaskOrder(tasks(3), 0)
    ledger = TaskLedger(order)
    for _ in range(3):
        ledger.next()
    again = TaskLedger(order, ledger.state(), held={1})
    assert [again.next().index for _ in range(3)] == [0, 2, 3]
    again.settle(1)
    assert [index for index, _ in again.state()["owed"]] == [0, 2, 3]


def test_retried_groups_come_first_and_keep_their_attempt():
    ledger = TaskLedger(TaskOrder(tasks(3), 0))
    first = ledger.next()
    ledger.next()
    ledger.retry(Group("t", [], first.index, attempt=1))
    again = ledger.next()
    assert (again.index, again.attempt, again.task) == (first.index, 1, first.task)


# --- samples -----------------------------------------------------------------------------------------


def test_every_trajectory_of_a_branched_episode_is_a_sample_with_its_reward():
    samples = samples_of(episode(tasks(1)[0], 3, trajectories=3), number=5)
    assert [(s.reward, s.episode) for s in samples] == [(1.0, 5)] * 3


def test_trajectories_without_loss_are_left_out():
    branched = episode(tasks(1)[0], 3, trajectories=2)
    branched.trajectories[1].loss_mask = [0] * 5
    assert len(samples_of(branched, 0)) == 1


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (failed(tasks(1)[0], "timeout"), "no_reward"),
        (EpisodeResult("t", "finished", 1.0), "no_tokens"),
        (failed(tasks(1)[0], "grading_error"), "grading_error"),
        (EpisodeResult("t", "crashed", 0.0, trajectories=episode(tasks(1)[0], 1).trajectories), "crashed"),
    ],
)
def test_unusable_episodes_give_no_sample_and_a_cause(result, cause):
    assert samples_of(result, 0) == []
    assert failure_cause(result) == cause


# --- places ------------------------------------------------------------------------------------------


async def test_places_are_never_exceeded_and_refilled_sample_by_sample():
    world = World(duration=lambda number: 40 if number == 0 else 1)
    buffer = buffer_of(capacity=100, max_staleness=9)
    async with running(worker_for(world.run_episode, buffer, samples=2, in_flight=4)) as worker:
        groups = await asyncio.wait_for(buffer.take(5), 5)
        # Episode 0 holds its group and one place back; the other three places went on.
        assert 0 not in [g.index for g in groups]
        assert world.most_running == 4
        assert worker.in_flight <= 4


async def test_a_new_group_waits_for_a_whole_groups_worth_of_places():
    """Three of four places are taken by two slow groups of three; the free one is not enough to start."""
    started = asyncio.Event()

    async def slow(task, labels):
        started.set()
        await asyncio.sleep(30)

    worker = worker_for(slow, buffer_of(capacity=9, max_staleness=0), samples=3, in_flight=5)
    async with running(worker):
        await started.wait()
        await asyncio.sleep(0.01)
        assert worker.in_flight == 3


async def test_a_full_buffer_stops_new_groups_and_a_taken_one_starts_them_again():
    world = World()
    buffer = buffer_of(capacity=3, max_staleness=9)
    async with running(worker_for(world.run_episode, buffer, samples=2, in_flight=4)):
        await asyncio.sleep(0.1)
        stopped_at = world.started
        # 3 groups wait, and those that were in flight when the third came wait to be put.
        assert len(buffer) == 3
        assert stopped_at <= 2 * (3 + 4)
        await asyncio.sleep(0.05)
        assert world.started == stopped_at
        assert buffer.waiting_for_room.seconds() > 0.05
        for _ in range(3):
            await asyncio.wait_for(buffer.take(3), 5)
        assert world.started > stopped_at


async def test_every_group_is_one_task_with_all_its_members():
    world = World(duration=lambda number: number % 3)
    buffer = buffer_of(capacity=50, max_staleness=9)
    order = TaskOrder(tasks(5), seed=0)
    async with running(
        worker_for(world.run_episode, buffer, ledger=TaskLedger(order), samples=3, in_flight=6)
    ):
        groups = await asyncio.wait_for(buffer.take(10), 5)
    for group in groups:
        assert group.task_id == order[group.index].id
        assert sorted(s.episode for s in group.samples) == [0, 1, 2]
    assert len({(label["group"], label["member"]) for label in world.labels}) == len(world.labels)


async def test_refilled_group_by_group_a_slow_episode_holds_its_groups_places():
    world = World(duration=lambda number: 10**6 if number == 0 else 1)
    buffer = buffer_of(capacity=100)
    async with running(worker_for(world.run_episode, buffer, samples=2, in_flight=4, refill="group")):
        groups = await asyncio.wait_for(buffer.take(3), 5)
        # Two of four places wait with episode 0: what goes on is one group of two at a time.
        assert [g.index for g in groups] == [1, 2, 3]
        assert world.running <= 3


async def test_with_over_sampling_a_group_does_not_wait_for_its_slowest_episode():
    world = World(duration=lambda number: 10**6 if number % 3 == 0 else 1)
    buffer = buffer_of(capacity=100)
    async with running(
        worker_for(world.run_episode, buffer, samples=2, in_flight=3, over_sampling=1)
    ) as worker:
        groups = await asyncio.wait_for(buffer.take(4), 5)
    assert all(len(g.samples) == 2 and not g.failures for g in groups)
    assert worker.counters.aborted >= 4
    assert world.running == 0


async def test_over_sampling_stands_in_for_failed_episodes():
    task = tasks(1)[0]
    world = World(break_episode=lambda number: failed(task) if number % 4 == 0 else None)
    buffer = buffer_of(capacity=100)
    async with running(worker_for(world.run_episode, buffer, samples=3, in_flight=4, over_sampling=1)):
        groups = await asyncio.wait_for(buffer.take(3), 5)
    assert all(len(g.samples) == 3 for g in groups)


@pytest.mark.parametrize("refill", ["sample", "group"])
async def test_an_aborted_group_is_collected_again_and_no_place_is_lost(refill):
    world = World(duration=lambda number: 10**6)
    ledger = TaskLedger(TaskOrder(tasks(5), seed=0))
    buffer = buffer_of(capacity=100)
    async with running(
        worker_for(world.run_episode, buffer, ledger=ledger, samples=2, in_flight=6, refill=refill)
    ) as worker:
        for turns in (0, 1, 20):  # before their first step, at it, and in their midst
            for _ in range(turns):
                await asyncio.sleep(0)
            await worker.abort()
        world.duration = lambda number: 1
        await worker.abort()
        groups = await asyncio.wait_for(buffer.take(12), 5)
        assert {0, 1, 2} <= {g.index for g in groups}
        assert all(g.attempt == 0 for g in groups)
    assert world.most_running == 6


async def test_every_group_knows_how_long_it_took():
    world = World(duration=lambda number: 30 if number < 2 else 1)
    buffer = buffer_of(capacity=100)
    async with running(worker_for(world.run_episode, buffer, samples=2, in_flight=4)):
        groups = {g.index: g for g in await asyncio.wait_for(buffer.take(30), 5)}
    seconds = {index: g.metadata["seconds"] for index, g in groups.items()}
    assert seconds[0] == max(seconds.values()) > 30 * 0.0005


# --- failures ----------------------------------------------------------------------------------------


async def test_failed_members_are_counted_and_the_rest_of_the_group_is_kept():
    task = tasks(1)[0]
    world = World(break_episode=lambda number: failed(task, "grading_error") if number % 4 == 0 else None)
    buffer = buffer_of(capacity=50, max_staleness=9)
    ended: list[EpisodeResult] = []
    async with running(
        worker_for(
            world.run_episode, buffer, samples=4, in_flight=4, on_episode=lambda r, seconds: ended.append(r)
        )
    ) as worker:
        groups = await asyncio.wait_for(buffer.take(4), 5)
    assert all(g.failures == ["grading_error"] and len(g.samples) == 3 for g in groups)
    failures = [result for result in ended if result.outcome == "grading_error"]
    assert worker.counters.failures["grading_error"] == len(failures) >= 4


async def test_a_group_with_fewer_than_two_usable_episodes_is_rejected_by_the_buffer():
    task = tasks(1)[0]
    world = World(break_episode=lambda number: failed(task) if number < 3 else None)
    buffer = buffer_of(capacity=50, max_staleness=9)
    async with running(worker_for(world.run_episode, buffer, samples=4, in_flight=4)):
        groups = await asyncio.wait_for(buffer.take(1), 5)
        assert groups[0].index == 1
        assert buffer.counters.rejected == {"failures": 1}


async def test_a_branched_episode_alone_does_not_make_a_group():
    async def run_episode(task: Task, labels):
        await asyncio.sleep(0.001)
        good = labels["member"] == "0" or labels["group"] != "0"
        return episode(task, 1, trajectories=3) if good else failed(task)

    buffer = buffer_of(capacity=50, max_staleness=9)
    async with running(worker_for(run_episode, buffer, samples=2, in_flight=2)):
        assert (await asyncio.wait_for(buffer.take(1), 5))[0].index == 1
        assert buffer.counters.rejected == {"failures": 1}


async def test_too_many_failures_in_a_row_stop_the_run_with_their_causes():
    task = tasks(1)[0]
    world = World(
        break_episode=lambda n: failed(task, "engine_error" if n % 3 else "setup_error", "No engine.")
    )
    worker = worker_for(world.run_episode, buffer_of(capacity=5, max_staleness=0), failures=6)
    with pytest.raises(UserError) as stopped:
        await asyncio.wait_for(worker.run(), 5)
    assert "6 episodes in a row failed (4 x engine_error, 2 x setup_error)" in str(stopped.value)
    assert "No engine." in str(stopped.value)
    assert world.running == 0


async def test_one_good_episode_in_between_resets_the_count():
    task = tasks(1)[0]
    world = World(break_episode=lambda n: failed(task) if n % 3 else None)
    buffer = buffer_of(capacity=90, max_staleness=0)
    async with running(worker_for(world.run_episode, buffer, samples=4, in_flight=4, failures=3)) as worker:
        await asyncio.sleep(0.1)
        assert worker.counters.failures["engine_error"] > 10


async def test_a_defect_in_an_episode_stops_the_run_as_itself():
    async def run_episode(task, labels):
        raise ZeroDivisionError("a defect")

    worker = worker_for(run_episode, buffer_of(capacity=5, max_staleness=0))
    with pytest.raises(ZeroDivisionError, match="a defect"):
        await worker.run()


# --- cancellation ------------------------------------------------------------------------------------


async def test_cancelling_the_worker_waits_for_every_episodes_clean_up():
    cleaned = 0

    async def run_episode(task, labels):
        nonlocal cleaned
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.02)  # what destroying a sandbox takes
            cleaned += 1

    worker = worker_for(run_episode, buffer_of(capacity=5, max_staleness=0), samples=2, in_flight=4)
    async with running(worker):
        await asyncio.sleep(0.01)
        assert worker.in_flight == 4
    assert cleaned == 4
    assert worker.in_flight == 0


async def test_cancelling_while_a_group_waits_to_be_put_leaves_it_owed():
    world = World()
    ledger = TaskLedger(TaskOrder(tasks(5), seed=0))
    buffer = buffer_of(capacity=1, max_staleness=0)
    async with running(worker_for(world.run_episode, buffer, ledger=ledger, samples=2, in_flight=4)):
        await asyncio.sleep(0.05)
    owed = [index for index, _ in ledger.state()["owed"]]
    assert owed == list(range(ledger.state()["cursor"]))


# --- what comes next


async def test_the_next_group_is_announced_while_it_waits_and_is_not_lost():
    buffer, world = buffer_of(9), World(duration=lambda number: 10**6)
    announced: list[tuple[str, str, str]] = []
    ledger = TaskLedger(TaskOrder(tasks(5), seed=0))
    worker = RolloutWorker(
        RolloutSettings(2, 2, 8),
        ledger=ledger,
        buffer=buffer,
        run_episode=world.run_episode,
        announce=lambda task, labels: announced.append((task.id, labels["group"], labels["member"])),
    )
    async with running(worker):
        while len(announced) < 4:  # noqa: ASYNC110 (the worker has no event for it)
            await asyncio.sleep(0)
        assert [(group, member) for _, group, member in announced] == [
            ("0", "0"),
            ("0", "1"),
            ("1", "0"),
            ("1", "1"),
        ]
        assert worker.in_flight <= 2
    assert sorted({ledger.next().index, ledger.next().index}) == [0, 1], "a group that waited was lost"
