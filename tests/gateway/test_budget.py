"""Budgets of sessions whose turns are sampled at the same time."""

import asyncio
from contextlib import nullcontext
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Serve
from tests.gateway.forest import answer, tree, turn, user
from tests.gateway.test_turns import create, inspect
from titogym.gateway.errors import RequestError
from titogym.gateway.sessions.budget import Budget
from titogym.gateway.sessions.policies import Placement
from titogym.gateway.sessions.spec import Limits


async def at_once(url: str, count: int, **fields: Any) -> list[httpx.Response]:
    async with httpx.AsyncClient(timeout=60) as client:
        asked = [{"messages": [{"role": "user", "content": f"{n}"}], **fields} for n in range(count)]
        return await asyncio.gather(*(client.post(f"{url}/chat/completions", json=body) for body in asked))


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 8}, {"stream": True}])
@pytest.mark.parametrize("limits", [{"turns": 3}, {"tokens": 20}, {"turns": 2, "tokens": 30}])
async def test_turns_at_the_same_time_keep_to_the_budget(
    serve: Serve, limits: dict[str, int], fields: dict[str, Any]
) -> None:
    stand = serve(["a b c d e f g"], engine={"token_latency": 0.005})
    session = create(stand.url, policy="branching", limits=limits)
    answers = await at_once(session.base_url, 6, **fields)
    report = inspect(stand.url, session)
    assert report["turns"] == sum(answer.status_code == 200 for answer in answers)
    assert 0 < report["turns"] <= limits.get("turns", 6)
    assert 0 < report["sampled_tokens"] <= limits.get("tokens", 1000)
    for refused in answers:
        if refused.status_code != 200:
            assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert report["exhausted"] in limits


async def test_what_a_turn_gives_back_is_there_for_the_next() -> None:
    """A turn that fails, or stops early, leaves its share to the one that waits for it."""
    forest = tree()
    budget = Budget(Limits(turns=2, tokens=10), forest)
    entered = []

    async def wait() -> None:
        async with budget.seat(None) as seat:
            entered.append(budget.allow(seat, Placement(None)))

    async with budget.seat(None) as first:
        assert budget.allow(first, Placement(None)) == 10
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0.01)
        assert entered == []
        turn(forest, [user("hi")], answer("x"), output=(1, 2, 3))
    await waiting
    assert entered == [7]
    turn(forest, [user("hi"), answer("x"), user("on")], answer("y"), output=(1, 2))
    async with budget.seat(4) as small:
        assert small.tokens == 4
        with pytest.raises(RequestError, match="2 turns"):
            budget.allow(small, Placement(None))


async def test_a_turn_sampled_again_gives_back_what_it_took() -> None:
    forest = tree()
    budget = Budget(Limits(turns=1, tokens=3), forest)
    node = turn(forest, [user("hi")], answer("x"), output=(1, 2, 3))
    async with budget.seat(None) as seat:
        with pytest.raises(RequestError, match="1 turns"):
            budget.allow(seat, Placement(None))
        assert budget.allow(seat, Placement(None, supersedes=node)) == 3


async def test_a_turn_that_is_continued_while_it_is_sampled_again_gives_nothing_back() -> None:
    forest = tree()
    budget = Budget(Limits(turns=4, tokens=10), forest)
    node = turn(forest, [user("hi")], answer("x"), output=(1, 2, 3, 4))
    async with budget.seat(2) as behind:
        assert budget.allow(behind, Placement(node)) == 6
        async with budget.seat(None) as again:
            assert budget.allow(again, Placement(None, supersedes=node)) == 4


@pytest.mark.parametrize("limits", [Limits(tokens=10), Limits(turns=2)])
async def test_an_earlier_attempt_that_is_continued_counts_once_more(limits: Limits) -> None:
    forest = tree()
    budget = Budget(limits, forest)
    lost = turn(forest, [user("hi")], answer("x"), output=(1, 2, 3, 4))
    tail = turn(forest, [user("hi")], answer("y"), output=(1, 2, 3))
    assert tail.supersedes == lost.id
    async with budget.seat(None) as seat:
        with pytest.raises(RequestError, match="2 turns") if limits.turns else nullcontext():
            assert budget.allow(seat, Placement(lost)) == 3  # beside the tail
        # In the tail's place, as in a linear session.
        assert budget.allow(seat, Placement(lost, supersedes=tail)) == (6 if limits.tokens else None)
