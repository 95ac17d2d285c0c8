"""The warm pool: nothing too many, nothing lost, whatever is cancelled or fails and when."""

import asyncio
import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titogym.envs.sandboxes.pool import WarmPool


class Maker:
    """Makes numbered things, and knows which of them exist."""

    def __init__(self) -> None:
        self.alive: set[str] = set()
        self.making = self.most = 0

    async def make(self, name: str, seconds: float = 0.0, *, fail: bool = False) -> str:
        self.making += 1
        self.most = max(self.most, self.making + len(self.alive))
        self.alive.add(name)
        try:
            await asyncio.sleep(seconds)
            if fail:
                raise OSError("no room")
        except BaseException:
            self.alive.discard(name)
            raise
        finally:
            self.making -= 1
        return name

    async def destroy(self, name: str) -> None:
        await asyncio.sleep(0)
        self.alive.remove(name)


async def test_things_are_ready_in_the_order_announced():
    maker = Maker()
    pool: WarmPool[str, str] = WarmPool(2, maker.destroy)
    for name in "abcd":
        pool.announce(name, partial(maker.make, name))
    await asyncio.sleep(0.01)
    assert maker.alive == {"a", "b"}
    assert await pool.take("a") == "a"
    await asyncio.sleep(0.01)
    assert maker.alive == {"a", "b", "c"}
    assert await pool.take("d") is None, "what nobody has begun is made by its taker"
    assert await pool.take("never announced") is None
    await pool.close()
    assert maker.alive == {"a"}, "what was taken is the taker's"


async def test_a_taker_waits_for_what_is_under_way_and_leaves_nothing_when_cancelled():
    maker = Maker()
    pool: WarmPool[str, str] = WarmPool(1, maker.destroy)
    pool.announce("a", lambda: maker.make("a", 0.05))
    assert await pool.take("a") == "a"
    pool.announce("b", lambda: maker.make("b", 60))
    taker = asyncio.create_task(pool.take("b"))
    await asyncio.sleep(0.01)
    taker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taker
    await pool.close()
    assert maker.alive == {"a"}


async def test_failures_and_old_things_are_not_offered():
    maker = Maker()
    pool: WarmPool[str, str] = WarmPool(4, maker.destroy, keep_seconds=0.05)
    pool.announce("bad", lambda: maker.make("bad", fail=True))
    pool.announce("old", lambda: maker.make("old"))
    pool.announce("unwanted", lambda: maker.make("unwanted"))
    assert await pool.take("bad") is None
    pool.forget("unwanted")
    await asyncio.sleep(0.1)
    assert await pool.take("old") is None
    await asyncio.sleep(0.01)
    assert maker.alive == set()
    await pool.close()


@given(seed=st.integers(0, 10**6), size=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_nothing_is_lost_or_too_many(seed, size):
    async def play() -> None:
        chance, maker = random.Random(seed), Maker()
        pool: WarmPool[str, str] = WarmPool(size, maker.destroy, keep_seconds=chance.choice([60, 0.004]))
        names = [str(number) for number in range(12)]
        for name in names:
            seconds, fail = chance.choice([0, 0.001, 0.003]), chance.random() < 0.2
            pool.announce(name, partial(maker.make, name, seconds, fail=fail))
        taken: set[str] = set()

        async def use(name: str) -> None:
            await asyncio.sleep(chance.random() * 0.01)
            got = await pool.take(name)
            if got is not None:
                assert got == name
                taken.add(name)
                maker.alive.remove(name)

        users = [asyncio.create_task(use(name)) for name in names if chance.random() < 0.8]
        for user in users:
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() * 0.004)
                user.cancel()
        await asyncio.wait(users) if users else None
        await pool.close()
        assert maker.alive == set()
        assert maker.making == 0
        assert maker.most <= 2 * size + 1

    asyncio.run(play())
