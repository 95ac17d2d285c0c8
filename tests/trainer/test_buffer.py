"""The buffer: definitions of age on worked examples, conservation and freshness as properties."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titogym.errors import UserError
from titogym.trainer.batch import Group, Sample
from titogym.trainer.rollout.buffer import BufferSettings, GroupBuffer, Stopwatch, age, mixed_rewards


def sample(*spans: tuple[int, str], mask: list[int] | None = None) -> Sample:
    """A sample whose spans are given as (tokens, version); token 0 is the prompt."""
    version_spans, position = [], 1
    for length, version in spans:
        version_spans.append((position, position + length, version))
        position += length
    loss_mask = mask or [0] + [1] * (position - 1)
    return Sample([0] * position, loss_mask, [0.0] * position, version_spans, reward=0.0)


def group(index: int, version: int = 0, attempt: int = 0) -> Group:
    return Group(f"task-{index}", [sample((3, str(version)))], index=index, attempt=attempt)


def buffer_of(capacity: int = 4, *, on_retry=None, on_drop=None, version: int = 0, **settings) -> GroupBuffer:
    hooks = {"on_retry": on_retry, "on_drop": on_drop}
    return GroupBuffer(
        BufferSettings(capacity=capacity, **settings),
        version=version,
        **{name: hook for name, hook in hooks.items() if hook},
    )


async def soon(awaitable):
    """The result if it is there after everything runnable has run, else None and the call is cancelled."""
    task = asyncio.ensure_future(awaitable)
    for _ in range(10):
        await asyncio.sleep(0)
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


# --- age ---------------------------------------------------------------------------------------------


def test_age_of_a_group_that_spans_versions():
    got = age([Group("t", [sample((1, "2"), (3, "4")), sample((4, "5"))])], current=7)
    assert (got.old, got.post, got.spread) == (5, 2, 3)
    assert got.token_weighted == pytest.approx((1 * 5 + 3 * 3 + 4 * 2) / 8)
    assert got.coverage == 1.0


def test_spans_without_a_published_version_are_left_out():
    got = age([Group("t", [sample((5, "default"), (1, "3")), sample((2, "default"))])], current=4)
    assert (got.old, got.post, got.token_weighted) == (1, 1, 1.0)
    assert got.coverage == 0.5


def test_a_group_without_versions_has_no_age():
    got = age([Group("t", [sample((5, "default"))])], current=9)
    assert (got.old, got.post, got.spread, got.token_weighted, got.coverage) == (None, None, None, None, 0.0)


def test_only_tokens_that_carry_loss_count():
    masked = sample((2, "0"), (2, "6"), mask=[0, 0, 0, 1, 1])
    assert age([Group("t", [masked])], current=7).old == 1


# --- the limit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("behind", "fresh"), [(0, True), (2, True), (3, False)])
async def test_rejected_only_when_strictly_older_than_the_limit(behind, fresh):
    buffer = buffer_of(capacity=4, max_staleness=2, version=5)
    await buffer.put(group(0, version=5 - behind))
    assert (await soon(buffer.take(1)) is not None) == fresh


async def test_a_group_without_versions_is_never_stale():
    buffer = buffer_of(capacity=4, max_staleness=0, version=1000)
    await buffer.put(Group("t", [sample((3, "default"))]))
    assert len(await buffer.take(1)) == 1


async def test_age_is_measured_when_taken_not_when_put():
    buffer = buffer_of(capacity=4, max_staleness=1)
    await buffer.put(group(0, version=0))
    buffer.advance(1)
    await buffer.put(group(1, version=1))
    buffer.advance(2)
    assert [g.index for g in await buffer.take(1)] == [1]


async def test_one_stale_member_makes_its_group_stale():
    buffer = buffer_of(capacity=4, max_staleness=1, version=3)
    await buffer.put(Group("t", [sample((3, "3")), sample((1, "1"), (2, "3"))]))
    assert await soon(buffer.take(1)) is None
    assert buffer.counters.dropped == 1


async def test_when_everything_is_stale_the_trainer_waits_for_fresh_groups():
    buffer = buffer_of(capacity=2, max_staleness=0, version=1)
    await buffer.put(group(0))
    await buffer.put(group(1))
    taking = asyncio.create_task(buffer.take(2))
    await asyncio.sleep(0)
    await buffer.put(
        group(2, version=0)
    )  # room was made, and stale ones that arrive later are refused as well
    await buffer.put(group(3, version=1))
    await buffer.put(group(4, version=1))
    assert [g.index for g in await taking] == [3, 4]
    assert buffer.counters.dropped == 3


async def test_retry_is_bounded_and_then_reported():
    retried, dropped = [], []
    buffer = buffer_of(
        capacity=4,
        max_staleness=0,
        max_retries=2,
        version=9,
        on_retry=lambda g, reason: retried.append((g.index, g.attempt)),
        on_drop=lambda g, reason: dropped.append((g.index, reason)),
    )
    for attempt in range(3):
        await buffer.put(group(7, version=1, attempt=attempt))
        assert await soon(buffer.take(1)) is None
    assert retried == [(7, 1), (7, 2)]
    assert dropped == [(7, "stale")]


async def test_without_retries_a_stale_group_is_dropped_as_stale():
    dropped = []
    buffer = buffer_of(
        capacity=1, max_staleness=0, version=1, on_drop=lambda g, reason: dropped.append(reason)
    )
    await buffer.put(group(0))
    assert await soon(buffer.take(1)) is None
    assert dropped == ["stale"]


# --- what is decided when a group is put -------------------------------------------------------------


def graded(*rewards: float, outcome: str = "finished") -> Group:
    members = [sample((3, "0")) for _ in rewards]
    for number, (member, reward) in enumerate(zip(members, rewards, strict=True)):
        member.episode, member.reward, member.metadata = number, reward, {"outcome": outcome}
    return Group("t", members)


async def test_a_group_with_too_few_usable_episodes_never_enters():
    dropped = []
    buffer = buffer_of(min_episodes=2, on_drop=lambda g, reason: dropped.append(reason))
    await buffer.put(graded(1.0))
    await buffer.put(Group("t", [], failures=["timeout"] * 4))
    branched = graded(1.0, 1.0, 1.0)
    for member in branched.samples:
        member.episode = 0  # three trajectories of one episode compare nothing
    await buffer.put(branched)
    assert (len(buffer), dropped) == (0, ["failures"] * 3)
    await buffer.put(graded(1.0, 0.0))
    assert len(buffer) == 1


async def test_failed_groups_are_retried_within_the_same_bound():
    retried, dropped = [], []
    buffer = buffer_of(
        min_episodes=2,
        max_retries=1,
        on_retry=lambda g, reason: retried.append((g.attempt, reason)),
        on_drop=lambda g, reason: dropped.append((g.attempt, reason)),
    )
    failing = graded(1.0)
    await buffer.put(failing)
    await buffer.put(failing)
    assert (retried, dropped) == ([(1, "failures")], [(1, "failures")])


async def test_timeouts_are_kept_with_their_grade_or_count_as_failures():
    late = graded(1.0, 0.0, 0.5)
    late.samples[2].metadata["outcome"] = "timeout"
    keeping, dropping = buffer_of(), buffer_of(keep_timeouts=False, min_episodes=2)
    await keeping.put(late)
    assert len((await keeping.take(1))[0].samples) == 3
    await dropping.put(late)
    assert [s.episode for s in (await dropping.take(1))[0].samples] == [0, 1]
    assert late.failures == ["timeout"]
    await dropping.put(graded(1.0, 0.0, outcome="timeout"))
    assert dropping.counters.rejected == {"failures": 1}


async def test_the_filter_refuses_groups_that_teach_nothing():
    dropped = []
    buffer = buffer_of(
        filter=mixed_rewards, max_retries=3, on_drop=lambda g, reason: dropped.append(g.metadata["filtered"])
    )
    await buffer.put(graded(1.0, 1.0))
    await buffer.put(graded(0.0, 1.0))
    await buffer.put(graded(0.0, 0.0))
    assert dropped == [
        "all rewards 1",
        "all rewards 0",
    ]  # final: no retry would differ
    assert len(buffer) == 1


async def test_a_filter_that_refuses_everything_ends_the_run_with_advice():
    buffer = buffer_of(filter=lambda g: "too easy", max_filtered_in_a_row=3)
    for _ in range(2):
        await buffer.put(graded(1.0))
    with pytest.raises(UserError, match=r"refused 3 groups in a row \(too easy\): .*buffer\.filter"):
        await buffer.put(graded(1.0))


async def test_a_filter_that_fails_is_named():
    with pytest.raises(UserError, match=r"buffer\.filter failed on task t: ZeroDivisionError"):
        await buffer_of(filter=lambda g: 1 / 0 > 0).put(graded(1.0))


async def test_waiting_groups_are_restored_ahead_of_new_ones():
    first = buffer_of()
    for index in range(3):
        await first.put(group(index))
    second = buffer_of()
    await second.put(group(7))
    second.restore(first.waiting())
    assert [g.index for g in await second.take(4)] == [0, 1, 2, 7]


# --- capacity and cancellation -----------------------------------------------------------------------


async def test_put_waits_while_full_and_room_counts_those_that_wait():
    buffer = buffer_of(capacity=2, max_staleness=0)
    for index in range(2):
        await buffer.put(group(index))
    waiting = asyncio.create_task(buffer.put(group(2)))
    await asyncio.sleep(0)
    assert len(buffer) == 2
    assert not waiting.done()
    assert [g.index for g in await buffer.take(1)] == [0]
    await waiting
    assert await soon(buffer.room()) is None  # full again: the one that waited took the place
    assert [g.index for g in await buffer.take(2)] == [1, 2]
    await asyncio.wait_for(buffer.room(), 1)


async def test_a_cancelled_take_loses_nothing():
    buffer = buffer_of(capacity=4, max_staleness=0)
    await buffer.put(group(0))
    assert await soon(buffer.take(2)) is None
    await buffer.put(group(1))
    assert [g.index for g in await buffer.take(2)] == [0, 1]


async def test_a_cancelled_put_frees_its_claim_to_room():
    buffer = buffer_of(capacity=1, max_staleness=0)
    await buffer.put(group(0))
    assert await soon(buffer.put(group(1))) is None
    await buffer.take(1)
    await asyncio.wait_for(buffer.room(), 1)
    assert len(buffer) == 0


async def test_taking_more_than_the_capacity_is_a_programming_error():
    with pytest.raises(ValueError, match="capacity 1"):
        await buffer_of(capacity=1, max_staleness=0).take(2)


def test_versions_never_go_back():
    buffer = buffer_of(capacity=1, max_staleness=0, version=3)
    with pytest.raises(ValueError, match="version 2"):
        buffer.advance(2)


def test_stopwatch_counts_overlapping_waits_once_and_the_present_one_too():
    now = [0.0]
    watch = Stopwatch(lambda: now[0])
    with watch.running():
        now[0] = 1.0
        with watch.running():
            now[0] = 3.0
        assert watch.seconds() == 3.0
    now[0] = 10.0
    assert watch.seconds() == 3.0


# --- properties --------------------------------------------------------------------------------------

operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 4)),  # versions behind the current one
        st.tuples(st.just("take"), st.integers(1, 3)),
        st.tuples(st.just("advance"), st.integers(1, 2)),
    ),
    max_size=40,
)


@given(operations, st.integers(3, 5), st.integers(0, 3), st.integers(0, 2))
@settings(max_examples=80)
def test_groups_are_conserved_fresh_and_in_order(script, capacity, limit, max_retries):
    """Against a model that is a plain list. A retried group is put again, resampled, as a worker would."""

    async def run() -> None:
        retried: list[Group] = []
        dropped: list[int] = []
        buffer = buffer_of(
            capacity=capacity,
            max_staleness=limit,
            max_retries=max_retries,
            on_retry=lambda g, reason: retried.append(g),
            on_drop=lambda g, reason: dropped.append(g.index),
            version=10,
        )
        model: list[tuple[int, int]] = []  # (index, version) of those that wait, in order
        taken: list[int] = []
        made = 0
        for operation, value in script:
            fresh = [(i, v) for i, v in model if buffer.version - v <= limit]
            if operation == "advance":
                buffer.advance(buffer.version + value)
            elif operation == "put":
                again = retried.pop() if retried else None
                index, attempt = (again.index, again.attempt) if again else (made, 0)
                version = buffer.version - value
                if len(model) == capacity:
                    assert await soon(buffer.put(group(index, version, attempt))) is None
                    if again:
                        retried.append(again)
                else:
                    made += again is None
                    await buffer.put(group(index, version, attempt))
                    model.append((index, version))
            else:
                got = await soon(buffer.take(value))
                if len(fresh) >= value:
                    assert got is not None
                    assert [g.index for g in got] == [i for i, _ in fresh[:value]]
                    assert all((age([g], buffer.version).old or 0) <= limit for g in got)
                    taken += [g.index for g in got]
                    fresh = fresh[value:]
                else:
                    assert got is None
                model = fresh
            assert len(buffer) == len(model) <= capacity
            assert all(g.attempt <= max_retries for g in retried)
        everywhere = Counter(taken) + Counter(dropped) + Counter(g.index for g in retried)
        everywhere += Counter(i for i, _ in model)
        assert everywhere == Counter(range(made))
        counters = buffer.counters
        assert counters.rejected.total() == counters.retried + counters.dropped
        assert counters.put == counters.taken + counters.rejected["stale"] + len(buffer)

    asyncio.run(run())


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=4),
    st.integers(1, 4),
    st.data(),
)
@settings(max_examples=40)
def test_concurrent_producers_and_a_trainer_lose_and_double_nothing(pauses, capacity, data):
    async def run() -> None:
        buffer = buffer_of(capacity=capacity, max_staleness=0)
        total = sum(len(p) for p in pauses)
        batch = data.draw(st.integers(1, capacity))

        async def produce(number: int, own: list[int]) -> None:
            for place, pause in enumerate(own):
                for _ in range(pause):
                    await asyncio.sleep(0)
                await buffer.room()
                await buffer.put(group(100 * number + place))
                assert len(buffer) <= capacity

        taken: list[int] = []
        async with asyncio.TaskGroup() as producers:
            for number, own in enumerate(pauses):
                producers.create_task(produce(number, own))
            while len(taken) < total - total % batch:
                taken += [g.index for g in await asyncio.wait_for(buffer.take(batch), 5)]
        taken += [g.index for g in await buffer.take(len(buffer))]
        assert sorted(taken) == sorted(100 * n + p for n, own in enumerate(pauses) for p in range(len(own)))

    asyncio.run(run())
