"""Sandboxes at Daytona (https://www.daytona.io), through its own SDK."""

import asyncio
import ipaddress
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titogym.cancellation import to_its_end
from titogym.envs.sandboxes import labels, owners
from titogym.envs.sandboxes.base import Build, Reaped, SandboxError, SandboxSpec, Snapshot, Unsupported
from titogym.envs.sandboxes.creation import Creation, CreationPolicy
from titogym.envs.sandboxes.daytona.sandbox import DaytonaSandbox
from titogym.envs.sandboxes.daytona.service import Service, failure, missing, refusal
from titogym.envs.sandboxes.destruction import Destruction
from titogym.envs.task import AllowList, Network
from titogym.errors import UserError

if TYPE_CHECKING:
    from daytona import AsyncSandbox, CreateSandboxFromImageParams, CreateSandboxFromSnapshotParams

log = logging.getLogger(__name__)

POLICY = CreationPolicy(rate=5.0, burst=10, attempts=6)
OURS = labels.PREFIX + "managed"  # a label of all our sandboxes, by which they are listed
_START_SECONDS = 120.0
_LATE_SECONDS = 2.0  # in which the service finishes a creation whose answer nobody waits for


class DaytonaBackend:
    """Makes sandboxes at Daytona. What is None is taken from DAYTONA_API_KEY, _API_URL and _TARGET.

    snapshot: what a task without an image of its own gets (None: the organisation's default).
    user: who the commands run as; tests need to write to /logs and /tests.
    labels: what every sandbox bears.
    """

    name = "daytona"
    own_loopback = True

    def __init__(
        self,
        api_key: str | None = None,
        api_url: str | None = None,
        target: str | None = None,
        snapshot: str | None = None,
        user: str = "root",
        policy: CreationPolicy = POLICY,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.labels = dict(labels or {})
        self.service = Service(api_key, api_url, target, policy)
        self.destruction = Destruction()
        self._plain, self._user = snapshot, user
        self._creation = Creation(policy, refusal)

    @property
    def undestroyed(self) -> dict[str, str]:
        return self.destruction.undestroyed

    async def create(self, spec: SandboxSpec) -> DaytonaSandbox:
        if spec.services:
            raise Unsupported(
                "A Daytona sandbox cannot reach services of this machine: start the gateway where Daytona "
                "can reach it and give the task an open network, or use a harness that runs outside."
            )
        client = self.service.client
        spec = replace(spec, labels={**self.labels, **spec.labels})

        async def attempt() -> DaytonaSandbox:
            name = owners.new_id()
            params, seconds = self._params(name, spec)
            try:
                remote = await client.create(params, timeout=seconds)
            except BaseException as error:
                await to_its_end(self._undo(name, error))
                raise
            sandbox = DaytonaSandbox(self, name, spec, remote)
            try:
                await sandbox.prepare()
            except BaseException:
                try:
                    await sandbox.destroy()
                except SandboxError as left:
                    log.error("what remained of creating the sandbox %s: %s", name, left)
                raise
            return sandbox

        try:
            return await self._creation(attempt)
        except Exception as error:
            raise failure(error, "create a sandbox") from error

    async def reap(self) -> Reaped:
        destroyed: list[str] = []
        failed: dict[str, str] = {}
        for remote in await self._listed({OURS: "true"}):
            if labels.abandoned(remote.labels):
                name = remote.labels[labels.ID]
                try:
                    await _delete(remote)
                    destroyed.append(name)
                except Exception as error:
                    failed[name] = str(failure(error, "delete the sandbox"))
        return Reaped(destroyed, failed)

    async def delete_snapshot(self, snapshot: Snapshot) -> None:
        if snapshot.backend != self.name:
            raise Unsupported(f"{snapshot} is not a snapshot of Daytona.")
        snapshots = self.service.client.snapshot

        async def delete() -> None:
            try:
                await snapshots.delete(await snapshots.get(snapshot.reference))
            except Exception as error:
                if not missing(error):
                    raise

        await self.destruction(snapshot.reference, delete)

    async def close(self) -> None:
        await self.destruction.remaining()
        await self.service.close()

    def _params(
        self, name: str, spec: SandboxSpec
    ) -> "tuple[CreateSandboxFromImageParams | CreateSandboxFromSnapshotParams, float]":
        """What to ask for, and how long it may take.

        The intervals and the age at which Daytona itself deletes the sandbox are its whole lifetime: what the
        agent may take, and set-up and grading beside. So a driver that dies leaves nothing for longer, and
        none that lives loses its sandbox before it is graded.
        """
        from daytona import CreateSandboxFromImageParams, CreateSandboxFromSnapshotParams, Image, Resources

        minutes = math.ceil(spec.lifetime / 60)
        common: dict[str, Any] = {
            "labels": {**labels.labels(name, spec, {}), OURS: "true"},
            "os_user": self._user,
            "auto_stop_interval": minutes,
            "auto_delete_interval": 0,  # as soon as it has stopped
            "ttl_minutes": minutes,
            **_network(spec.network),
        }
        if spec.image is None or isinstance(spec.image, Snapshot):
            if isinstance(spec.image, Snapshot) and spec.image.backend != self.name:
                raise Unsupported(f"{spec.image} is not a snapshot of Daytona.")
            reference = spec.image.reference if spec.image else self._plain
            return CreateSandboxFromSnapshotParams(snapshot=reference, **common), _START_SECONDS
        seconds = _START_SECONDS
        image: str | Image = "" if isinstance(spec.image, Build) else spec.image
        if isinstance(spec.image, Build):
            seconds += spec.image.seconds
            dockerfile = spec.image.context / spec.image.dockerfile
            if not dockerfile.is_file():
                raise UserError(f"{dockerfile} does not exist.")
            image = Image.from_dockerfile(dockerfile, strict_context=True)
        limits = spec.limits
        resources = Resources(
            cpu=math.ceil(limits.cpus),
            memory=math.ceil(limits.memory_mb / 1024),
            disk=math.ceil(limits.storage_mb / 1024),
        )
        return CreateSandboxFromImageParams(image=image, resources=resources, **common), seconds

    async def _undo(self, name: str, error: BaseException) -> None:
        """Delete what a creation that failed may have made, whether or not its answer arrived."""

        async def delete() -> None:
            left = await self._listed({labels.ID: name})
            if not left and getattr(error, "status_code", None) is None:
                await asyncio.sleep(_LATE_SECONDS)  # nobody waits for the answer: it may be made just now
                left = await self._listed({labels.ID: name})
            for remote in left:
                await _delete(remote)
            made = getattr(error, "sandbox_id", None)
            if made is not None:
                try:
                    remote = await self.service.client.get(made)
                except Exception as gone:
                    if not missing(gone):
                        raise
                else:
                    await _delete(remote)

        if isinstance(error, Unsupported | UserError) or getattr(error, "status_code", None) in (
            401,
            403,
            429,
        ):
            return  # nothing was made
        try:
            await self.destruction(name, delete)
        except Exception as left:
            log.error("what remained of creating the sandbox %s: %s", name, left)

    async def _listed(self, wanted: Mapping[str, str]) -> "list[AsyncSandbox]":
        from daytona import ListSandboxesQuery

        async def listed() -> "list[AsyncSandbox]":
            query = ListSandboxesQuery(labels=dict(wanted))
            return [remote async for remote in self.service.client.list(query)]

        return await self.service.patiently(listed, "list the sandboxes")


async def _delete(remote: "AsyncSandbox") -> None:
    try:
        await remote.delete(timeout=60, wait=True)
    except Exception as error:
        if not missing(error):
            raise


def _network(network: Network) -> dict[str, Any]:
    if not isinstance(network, AllowList):
        return {"network_block_all": network == "none"}
    ranges, domains = [], []
    for host in network.hosts:
        try:
            ranges.append(str(ipaddress.IPv4Network(host)))
        except ValueError:
            if ":" in host:
                raise Unsupported(
                    f"Daytona's allow-lists hold IPv4 addresses and names without ports, not {host!r}."
                ) from None
            domains.append(host)
    if not ranges and not domains:
        return {"network_block_all": True}
    return {
        "network_allow_list": ",".join(ranges) or None,
        "domain_allow_list": ",".join(domains) or None,
    }
