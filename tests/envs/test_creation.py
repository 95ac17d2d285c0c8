"""Creation is rate-limited and tried again; destruction is tried again; labels say whose a sandbox is."""

import asyncio
import sys
import time
from dataclasses import replace

import pytest

from titogym.envs.sandboxes import labels, owners, registry
from titogym.envs.sandboxes.base import SandboxError, SandboxSpec
from titogym.envs.sandboxes.creation import Creation, CreationPolicy, Refusal
from titogym.envs.sandboxes.destruction import Destruction
from titogym.errors import UserError


class Refused(Exception):
    def __init__(self, retry_after: float | None = None) -> None:
        self.retry_after = retry_after


def refusal(error: Exception) -> Refusal | None:
    return Refusal(error.retry_after) if isinstance(error, Refused) else None


QUICK = CreationPolicy(rate=1e6, burst=1000, attempts=4, pause=0.01)


def failing(times: int, error: Exception):
    calls: list[float] = []

    async def create() -> str:
        calls.append(time.monotonic())
        if len(calls) <= times:
            raise error
        return "made"

    return create, calls


async def test_refusals_are_tried_again_and_the_last_is_told():
    create, calls = failing(3, Refused())
    assert await Creation(QUICK, refusal)(create) == "made"
    assert len(calls) == 4
    create, calls = failing(4, Refused())
    with pytest.raises(Refused):
        await Creation(QUICK, refusal)(create)
    assert len(calls) == 4


async def test_other_errors_are_not():
    create, calls = failing(1, ValueError("no such image"))
    with pytest.raises(ValueError, match="no such image"):
        await Creation(QUICK, refusal)(create)
    assert len(calls) == 1


async def test_it_waits_as_long_as_the_service_asks():
    create, calls = failing(1, Refused(retry_after=0.3))
    await Creation(QUICK, refusal)(create)
    assert 0.3 <= calls[1] - calls[0] < 1
    create, calls = failing(1, Refused(retry_after=10_000))
    await Creation(replace(QUICK, longest_wait=0.1), refusal)(create)
    assert calls[1] - calls[0] < 1


async def test_pauses_grow_and_differ():
    creation = Creation(CreationPolicy(pause=1, longest_pause=8), refusal)
    for attempt, most in ((1, 1), (2, 2), (3, 4), (9, 8)):
        pauses = {creation._seconds(attempt, Refusal()) for _ in range(200)}
        assert len(pauses) > 100
        assert 0.8 * most < max(pauses) <= most
        assert min(pauses) < 0.2 * most


async def test_creations_are_spread():
    creation = Creation(CreationPolicy(rate=50, burst=5), refusal)
    create, calls = failing(0, Refused())
    started = time.monotonic()
    await asyncio.gather(*(creation(create) for _ in range(20)))
    assert sum(at - started < 0.01 for at in calls) <= 6
    assert calls[-1] - started > 0.28  # fifteen of them, fifty a second


async def test_a_destruction_that_fails_is_tried_again_told_and_kept():
    destruction, tries = Destruction(pauses=(0.01, 0.01)), 0

    async def destroy() -> None:
        nonlocal tries
        tries += 1
        if tries < broken:
            raise OSError("busy")

    broken = 3
    await destruction("one", destroy)
    assert (tries, destruction.undestroyed) == (3, {})
    broken = 10
    with pytest.raises(SandboxError, match="one could not be destroyed: busy"):
        await destruction("one", destroy)
    assert destruction.undestroyed == {"one": "OSError: busy"}
    await destruction.remaining()
    assert destruction.undestroyed == {"one": "OSError: busy"}
    broken = 0
    await destruction.remaining()
    assert destruction.undestroyed == {}


async def test_a_destruction_reaches_its_end_though_it_is_cancelled():
    destruction, ended = Destruction(), []

    async def destroy() -> None:
        await asyncio.sleep(0.05)
        ended.append(True)

    task = asyncio.create_task(destruction("one", destroy))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


def test_labels_tell_a_leftover():
    mine = labels.labels("id-1", SandboxSpec(labels={"episode": "7"}, lifetime=60), {"run": "r"})
    assert (mine["titogym.run"], mine["titogym.episode"], mine["titogym.id"]) == ("r", "7", "id-1")
    assert not labels.abandoned(mine)
    dead = replace(owners.me(), started=owners.me().started - 1)
    assert labels.abandoned({**mine, labels.OWNER: str(dead)})
    elsewhere = {**mine, labels.OWNER: str(replace(dead, boot="another-machine"))}
    assert not labels.abandoned(elsewhere)
    assert labels.abandoned({**elsewhere, labels.EXPIRES: "1000"})
    assert not labels.abandoned({**elsewhere, labels.EXPIRES: "never"})
    assert not labels.abandoned({labels.OWNER: str(dead)}), "it is not ours"


async def test_without_the_sdk_there_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "docker", None)
    made = registry.backend("docker", host="unix:///nowhere.sock")
    for _ in range(2):
        with pytest.raises(UserError, match=r"pip install -e '/.*\[docker\]'"):
            await made.create(SandboxSpec())


def test_backends_are_found_by_name():
    assert {"local", "docker", "daytona"} <= set(registry.backends())
    assert registry.backend("local", labels={"run": "r"}).name == "local"
    assert registry.backend("titogym.envs.sandboxes.local:LocalBackend").name == "local"
    with pytest.raises(UserError, match="no sandbox backend 'cellar'"):
        registry.backend("cellar")
    with pytest.raises(UserError, match="has no option 'colour'; it has root, labels"):
        registry.backend("local", colour="red")
