"""Sandboxes in containers of Docker, or of Podman through its compatible socket."""

import asyncio
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from titogym.cancellation import to_its_end
from titogym.envs.sandboxes.base import Reaped, SandboxSpec, Snapshot, Unsupported
from titogym.envs.sandboxes.creation import Creation, CreationPolicy, Refusal
from titogym.envs.sandboxes.destruction import Destruction
from titogym.envs.sandboxes.docker import leftovers
from titogym.envs.sandboxes.docker.engine import Engine, EngineError
from titogym.envs.sandboxes.docker.images import BACKEND, Images, reference_of
from titogym.envs.sandboxes.docker.sandbox import DockerSandbox
from titogym.envs.sandboxes.storage import StorageWatch
from titogym.envs.task import AllowList
from titogym.errors import UserError

log = logging.getLogger(__name__)

PLAIN_IMAGE = "python:3.12-slim"
SETTLE_SECONDS = 2.0  # that a busy engine may go on with what a killed driver had asked of it
POLICY = CreationPolicy(rate=20.0, burst=32, attempts=4)  # one engine starts a few containers a second


class DockerBackend:
    """Makes sandboxes on the engine at `host` (default: $DOCKER_HOST, $CONTAINER_HOST, the usual sockets).

    image: what a task without an image of its own gets; with a python3, to carry ports where the driver
      is not root beside the engine.
    network: the engine's network of a task whose network is open.
    build_network: the network of a build's RUN lines (None: the engine's default; "none" for no network).
    labels: what every sandbox bears.
    """

    name = BACKEND

    def __init__(
        self,
        host: str | None = None,
        image: str = PLAIN_IMAGE,
        network: str = "bridge",
        build_network: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.labels = dict(labels or {})
        self.network = network
        self.destruction = Destruction()
        self.plain_image = image
        self._host, self._build_network = host, build_network
        self._creation = Creation(POLICY, _refusal)
        self._opened: asyncio.Task[None] | None = None
        self._engine: Engine | None = None
        self._images: Images | None = None
        self._reaped = Reaped([], {})
        self._cpus = math.inf  # that the engine's machine has
        self.storage: StorageWatch | None = None  # where the engine's disk can be seen from here
        self.limits_disk = True  # until the engine has refused to

    @property
    def own_loopback(self) -> bool:
        return self.network != "host"

    @property
    def undestroyed(self) -> dict[str, str]:
        return self.destruction.undestroyed

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "create() and reap() connect first"
        return self._engine

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        await self._open()
        assert self._images is not None
        if spec.mounts and not self.engine.here:
            raise Unsupported(
                f"The engine at {self.engine.address} does not see this machine's files, which the harness "
                "mounts: run the driver beside the engine, or a harness that runs outside the sandbox."
            )
        for mount in spec.mounts:
            if not mount.source.exists():
                raise UserError(f"{mount.source} does not exist, so the sandbox cannot show it.")
        image = await self._images.get(spec.image)
        if spec.services or isinstance(spec.network, AllowList):
            await self._images.get(None)  # of the container that may have to carry its ports
        limits = replace(spec.limits, cpus=min(spec.limits.cpus, self._cpus))  # the engine refuses more
        spec = replace(spec, limits=limits, labels={**self.labels, **spec.labels})

        async def attempt() -> DockerSandbox:
            sandbox = DockerSandbox(self, spec, image)
            try:
                await to_its_end(sandbox.start())
            except BaseException:
                await sandbox.destroy()
                raise
            return sandbox

        return await self._creation(attempt)

    async def reap(self) -> Reaped:
        await self._open()
        first, self._reaped = self._reaped, Reaped([], {})  # what was swept up when this backend connected
        done = await leftovers.reap(self.engine, SETTLE_SECONDS)
        return Reaped([*first.destroyed, *done.destroyed], done.failed)

    async def delete_snapshot(self, snapshot: Snapshot) -> None:
        reference = reference_of(snapshot)
        await self._open()

        async def delete() -> None:
            try:
                await self.engine.call(self.engine.api.remove_image, reference, force=True)
            except EngineError as error:
                if error.status != 404:
                    raise

        await self.destruction(reference, delete)

    async def close(self) -> None:
        await self.destruction.remaining()
        if self._engine is not None:
            self._engine.close()
        self._engine = self._opened = None

    async def _open(self) -> None:
        """Connect and sweep up after dead drivers, once."""
        if self._opened is None:
            self._opened = asyncio.create_task(self._connect())
        try:
            await asyncio.shield(self._opened)
        except (UserError, EngineError):
            self._opened = None  # the engine may be there next time
            raise

    async def _connect(self) -> None:
        self._engine = await asyncio.to_thread(Engine, self._host)
        self._images = Images(self._engine, self.plain_image, self._build_network)
        info = await self._engine.call(self._engine.api.info)
        self._cpus = float(info.get("NCPU") or self._cpus)
        directory = info.get("DockerRootDir")
        if self._engine.here and directory and await asyncio.to_thread(os.path.isdir, directory):
            self.storage = StorageWatch(Path(directory))
        self._reaped = await leftovers.reap(self._engine, settle=0.0)
        for name, reason in self._reaped.failed.items():
            log.warning("the leftover sandbox %s could not be removed: %s", name, reason)


def _refusal(error: Exception) -> Refusal | None:
    if isinstance(error, EngineError) and (error.status is None or error.status in (429, 502, 503, 504)):
        return Refusal()
    return None
