"""Everything on the engine that belongs to a sandbox, found by its labels and removed."""

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from titogym.envs.sandboxes import labels
from titogym.envs.sandboxes.base import Reaped, SandboxError
from titogym.envs.sandboxes.docker.engine import Engine

_GONE = 404
_BUSY = 409  # it is being removed, or what uses it is
_LOOK_SECONDS = 0.5
_PATIENCE = 10.0  # s that removing one thing may be busy


async def remove(engine: Engine, sandbox_id: str) -> None:
    """Remove the sandbox's containers, volumes and images, half-made ones too. Raises `SandboxError`."""
    await engine.call(_remove, engine.api, sandbox_id)


async def reap(engine: Engine, settle: float) -> Reaped:
    """Remove what dead or overdue drivers left on this engine.

    Looks until nothing has been found for `settle` seconds: an engine goes on with what a driver asked of
    it just before it was killed.
    """
    destroyed: list[str] = []
    failed: dict[str, str] = {}
    quiet = time.monotonic()
    while True:
        found = await leftovers(engine)
        for name in sorted(found):
            try:
                await remove(engine, name)
                destroyed.append(name)
                failed.pop(name, None)
            except SandboxError as error:  # tried again at the next look: it may have been in use just now
                failed[name] = str(error)
        now = time.monotonic()
        quiet = now if found - failed.keys() else quiet
        if now - quiet >= settle:
            return Reaped([name for name in dict.fromkeys(destroyed) if name not in failed], failed)
        await asyncio.sleep(min(_LOOK_SECONDS, settle))


async def leftovers(engine: Engine) -> set[str]:
    """Ids of the sandboxes and snapshots, or parts of them, that have no driver any more."""

    def look() -> set[str]:
        ours = [found for _, found in _things(engine.api, labels.ID)]
        return {found[labels.ID] for found in ours if labels.abandoned(found)}

    return await engine.call(look)


def _remove(api: Any, sandbox_id: str) -> None:
    for remove_it, _ in list(_things(api, f"{labels.ID}={sandbox_id}")):
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                remove_it()
            except Exception as error:
                status = getattr(error, "status_code", None)
                if status == _GONE:
                    break
                if status != _BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                break


def _things(api: Any, label: str) -> Iterator[tuple[Callable[[], object], dict[str, str]]]:
    """How to remove each thing with this label, and its labels; containers first, which use the others."""
    wanted = {"label": label}
    for found in api.containers(all=True, filters=wanted):
        yield partial(api.remove_container, found["Id"], force=True, v=True), found["Labels"] or {}
    for found in api.volumes(filters=wanted)["Volumes"] or ():
        yield partial(api.remove_volume, found["Name"], force=True), found["Labels"] or {}
    for found in api.images(filters=wanted):
        yield partial(api.remove_image, found["Id"], force=True), found["Labels"] or {}
