"""Images of sandboxes: pulled when missing, built from a Dockerfile, or kept from an earlier sandbox."""

import asyncio
import hashlib
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titogym.envs.sandboxes.base import Build, SandboxError, Snapshot, Unsupported
from titogym.envs.sandboxes.docker.engine import LONG_CALLS, Engine, EngineError, translated
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
        self._slots = asyncio.Semaphore(LONG_CALLS)

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
        def begin(api: Any) -> Iterable[dict[str, Any]]:
            from docker import utils

            repository, tag = utils.parse_repository_tag(reference)
            chunks: Iterable[dict[str, Any]] = api.pull(
                repository, tag=tag or "latest", stream=True, decode=True
            )
            return chunks

        try:
            await self._follow(begin, None)
        except SandboxError as error:
            raise UserError(
                f"The image {reference!r} is not on the engine and cannot be pulled ({error}): check its "
                f"name and the engine's network, or load it (`docker load`, `docker pull {reference}`)."
            ) from error

    async def _build(self, build: Build, reference: str) -> None:
        def begin(api: Any) -> Iterable[dict[str, Any]]:
            chunks: Iterable[dict[str, Any]] = api.build(
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

        try:
            await self._follow(begin, build.seconds)
        except SandboxError as error:
            raise SandboxError(f"{build.context / build.dockerfile} could not be built: {error}") from error

    async def _follow(self, begin: Callable[[Any], Iterable[dict[str, Any]]], seconds: float | None) -> None:
        """Wait for the end of a progress stream. Letting go of it makes the engine stop."""
        async with self._slots:
            stream = _Stream(await self._engine.call(self._engine.connect), begin)
            try:
                async with asyncio.timeout(seconds):
                    await stream.ended
            except TimeoutError:
                raise SandboxError(
                    f"it was not done within {seconds:g} s; it said last: {stream.last_words}"
                ) from None
            finally:
                stream.cut()


class _Stream:
    """A progress stream on a connection of its own, read by a thread that nobody need wait for.

    `ended` raises `SandboxError` when the engine reports a failure.
    """

    def __init__(self, api: Any, begin: Callable[[Any], Iterable[dict[str, Any]]]) -> None:
        self._api = api
        self._begin = begin
        self._said = ""
        self._response: Any = None
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        helper = api._stream_helper

        def remember(response: Any, decode: bool = False) -> Any:
            self._response = response
            return helper(response, decode)

        api._stream_helper = remember
        threading.Thread(target=self._read, name="docker-progress", daemon=True).start()

    @property
    def last_words(self) -> str:
        return self._said[-_SAID_CHARS:].strip()

    def cut(self) -> None:
        """Close the connection under the reading thread, which may be waiting for a silent engine."""
        self.ended.cancel()
        if self._response is not None:
            with suppress(OSError, AttributeError, ValueError):
                descriptor = self._api._get_raw_response_socket(self._response).fileno()
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        error: Exception | None = None
        try:
            chunks = iter(translated(self._begin, self._api))
            while (chunk := translated(next, chunks, None)) is not None:
                if "error" in chunk:
                    raise SandboxError(f"{str(chunk['error']).strip()}; it said last: {self.last_words}")
                told = str(chunk.get("stream") or chunk.get("status") or "")
                self._said = (self._said + told)[-2 * _SAID_CHARS :]
        except SandboxError as failure:
            error = failure
        except Exception as failure:
            error = SandboxError(f"the container engine does not answer: {failure}")
        finally:
            self._api.close()
        with suppress(RuntimeError):  # the loop has ended before us
            self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


def reference_of(snapshot: Snapshot) -> str:
    """Raises `Unsupported` for a snapshot of another backend."""
    if snapshot.backend != BACKEND:
        raise Unsupported(f"{snapshot} is not a snapshot of the docker sandbox.")
    return snapshot.reference


def _digest(build: Build) -> str:
    """Of everything that the build can read: paths, modes and contents. Raises `UserError`."""
    if not (build.context / build.dockerfile).is_file():
        raise UserError(f"{build.context / build.dockerfile} is missing, so no image can be built from it.")
    found = hashlib.sha256(build.dockerfile.encode())
    for directory, folders, files in os.walk(build.context):
        folders.sort()
        for name in sorted((*files, *(folder for folder in folders if Path(directory, folder).is_symlink()))):
            path = Path(directory, name)
            found.update(os.fsencode(f"\0{path.relative_to(build.context)}\0{path.lstat().st_mode:o}\0"))
            if path.is_symlink():
                found.update(os.fsencode(os.readlink(path)))
            elif path.is_file():
                with path.open("rb") as file:
                    found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:32]
