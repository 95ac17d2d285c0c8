"""Images of sandboxes: pulled when missing, built from a Dockerfile, or kept from an earlier sandbox."""

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from titogym.envs.sandboxes.base import Build, SandboxError, Snapshot, Unsupported
from titogym.envs.sandboxes.docker.engine import Engine, EngineError, translated
from titogym.errors import UserError

BACKEND = "docker"
BUILDS = "titogym-build"  # repository of built images; their tag is the digest of their context
_SAID_CHARS = 400


@dataclass(frozen=True, slots=True)
class Image:
    """An image that the engine has: `reference`, the user it runs as ("" for root), its own PATH."""

    reference: str
    user: str
    path: str


class Images:
    """Makes images present. Each is pulled or built once, however many sandboxes wait for it."""

    def __init__(self, engine: Engine, plain: str, build_network: str | None) -> None:
        self._engine = engine
        self._plain = plain
        self._build_network = build_network
        self._making: dict[str, asyncio.Task[None]] = {}

    async def get(self, wanted: str | Build | Snapshot | None) -> Image:
        """Raises `UserError` for an image that cannot be had."""
        match wanted:
            case Build():
                reference = f"{BUILDS}:{await asyncio.to_thread(_digest, wanted)}"
                if not await self._present(reference):
                    await self._once(reference, lambda: self._build(wanted, reference))
            case Snapshot():
                reference = reference_of(wanted)
                if not await self._present(reference):
                    raise SandboxError(f"The engine has no {wanted} any more.")
            case _:
                reference = wanted or self._plain
                if not await self._present(reference):
                    await self._once(reference, lambda: self._pull(reference))
        found = await self._engine.call(self._engine.api.inspect_image, reference)
        config = found.get("Config") or {}
        variables = dict(pair.partition("=")[::2] for pair in config.get("Env") or ())
        return Image(reference, config.get("User") or "", variables.get("PATH", ""))

    async def _present(self, reference: str) -> bool:
        try:
            await self._engine.call(self._engine.api.inspect_image, reference)
        except EngineError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def _once(self, reference: str, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for what another sandbox has begun, or begin it."""
        if reference not in self._making:
            task = self._making[reference] = asyncio.create_task(make())
            task.add_done_callback(lambda _: self._making.pop(reference))
        await asyncio.shield(self._making[reference])

    async def _pull(self, reference: str) -> None:
        stop = threading.Event()
        try:
            await self._engine.long_call(_follow, partial(self._pulling, reference), stop, None)
        except SandboxError as error:
            raise UserError(
                f"The image {reference!r} is not on the engine and cannot be pulled ({error}): check its "
                f"name and the engine's network, or load it (`docker load`, `docker pull {reference}`)."
            ) from error
        finally:
            stop.set()

    def _pulling(self, reference: str) -> Iterable[dict[str, Any]]:
        from docker import utils

        repository, tag = utils.parse_repository_tag(reference)
        chunks: Iterable[dict[str, Any]] = self._engine.api.pull(
            repository, tag=tag or "latest", stream=True, decode=True
        )
        return chunks

    async def _build(self, build: Build, reference: str) -> None:
        stop = threading.Event()
        try:
            await self._engine.long_call(
                _follow, lambda: self._building(build, reference), stop, build.seconds
            )
        except SandboxError as error:
            raise SandboxError(f"{build.context / build.dockerfile} could not be built: {error}") from error
        finally:
            stop.set()

    def _building(self, build: Build, reference: str) -> Iterable[dict[str, Any]]:
        chunks: Iterable[dict[str, Any]] = self._engine.api.build(
            path=str(build.context),
            dockerfile=build.dockerfile,
            tag=reference,
            rm=True,
            forcerm=True,
            decode=True,
            network_mode=self._build_network,
            timeout=max(1, round(build.seconds)),
        )
        return chunks


def reference_of(snapshot: Snapshot) -> str:
    """Raises `Unsupported` for a snapshot of another backend."""
    if snapshot.backend != BACKEND:
        raise Unsupported(f"{snapshot} is not a snapshot of the docker sandbox.")
    return snapshot.reference


def _follow(
    begin: Callable[[], Iterable[dict[str, Any]]], stop: threading.Event, seconds: float | None
) -> None:
    """Read a progress stream to its end. Letting go of it makes the engine stop."""
    deadline = None if seconds is None else time.monotonic() + seconds
    chunks = iter(translated(begin))
    said = ""
    try:
        while (chunk := translated(next, chunks, None)) is not None:
            if "error" in chunk:
                raise SandboxError(
                    f"{str(chunk['error']).strip()}; it said last: {said[-_SAID_CHARS:].strip()}"
                )
            said = (said + str(chunk.get("stream") or chunk.get("status") or ""))[-2 * _SAID_CHARS :]
            if stop.is_set():
                return
            if deadline is not None and time.monotonic() > deadline:
                raise SandboxError(
                    f"it was not done within {seconds:g} s; it said last: {said[-_SAID_CHARS:]}"
                )
    finally:
        with suppress(AttributeError):
            chunks.close()  # type: ignore[attr-defined]


def _digest(build: Build) -> str:
    """Of everything that the build can read: paths, modes and contents. Raises `UserError`."""
    if not (build.context / build.dockerfile).is_file():
        raise UserError(f"{build.context / build.dockerfile} is missing, so no image can be built from it.")
    found = hashlib.sha256(build.dockerfile.encode())
    for directory, folders, files in os.walk(build.context):
        folders.sort()
        for name in sorted((*files, *(folder for folder in folders if Path(directory, folder).is_symlink()))):
            path = Path(directory, name)
            found.update(f"\0{path.relative_to(build.context)}\0{path.lstat().st_mode:o}\0".encode())
            if path.is_symlink():
                found.update(os.readlink(path).encode())
            elif path.is_file():
                with path.open("rb") as file:
                    found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:32]
