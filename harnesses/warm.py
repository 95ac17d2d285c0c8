"""Episodes begun ahead of their turn: sandbox made, environment reset, nothing asked of the model yet."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from titogym.cancellation import to_its_end
from titogym.envs.environment import Environment, Observation
from titogym.envs.registry import environment as find_environment
from titogym.envs.sandboxes.base import Sandbox, SandboxBackend, SandboxSpec
from titogym.envs.sandboxes.pool import WarmPool
from titogym.envs.task import Task
from titogym.gateway.client import GatewayClient
from titogym.harnesses.base import Harness

INSIDE_PORT = 8080  # loopback port of a sandbox that leads to the gateway

Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Ready:
    """A world that waits for its agent."""

    environment: Environment
    sandbox: Sandbox
    first: Observation


class WarmStarts:
    """Makes at most `size` worlds ready for the episodes that were announced.

    For `run_episode`'s `warm`; one object serves the episodes of one harness on one backend. An episode
    that was not announced, or whose turn comes too early, starts cold.
    """

    def __init__(
        self, size: int, *, harness: Harness, backend: SandboxBackend, gateway: GatewayClient
    ) -> None:
        self._harness, self._backend, self._gateway = harness, backend, gateway
        self._pool: WarmPool[Key, Ready] = WarmPool(size, _undo)

    def announce(self, task: Task, labels: Mapping[str, str]) -> None:
        """An episode of `task` under `labels` will come."""
        inside = enclosed(self._harness, task, self._backend, self._gateway.urls[0])
        if inside and len(self._gateway.urls) > 1:
            return  # which gateway will serve it is not known yet
        if not find_environment(task.environment).needs_sandbox:
            return
        address = address_of(self._gateway.urls[0]) if inside else None
        self._pool.announce(_key(task, labels), lambda: self._make(task, labels, address))

    def forget(self, task: Task, labels: Mapping[str, str]) -> None:
        """That episode will not come after all."""
        self._pool.forget(_key(task, labels))

    async def take(self, task: Task, labels: Mapping[str, str]) -> Ready | None:
        return await self._pool.take(_key(task, labels))

    async def close(self) -> None:
        await self._pool.close()

    async def _make(self, task: Task, labels: Mapping[str, str], address: str | None) -> Ready:
        await self._harness.prepare()
        environment = find_environment(task.environment)
        sandbox = await self._backend.create(spec_of(task, self._harness, labels, address))
        try:
            first = await environment.reset(task, sandbox)
        except BaseException:
            await to_its_end(_close(environment, sandbox))
            raise
        return Ready(environment, sandbox, first)


def enclosed(harness: Harness, task: Task, backend: SandboxBackend, gateway: str) -> bool:
    """Whether the URL `gateway` leads nowhere for the agent's program, so that it needs a port of its own."""
    if not harness.inside:
        return False
    return task.network != "open" or (backend.own_loopback and _is_loopback(gateway))


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_of(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def spec_of(task: Task, harness: Harness, labels: Mapping[str, str], address: str | None) -> SandboxSpec:
    """The sandbox of an episode; `address` is the gateway's where the agent needs a way out to it."""
    return replace(
        SandboxSpec.for_task(task, {"task": task.id, **labels}),
        mounts=harness.mounts(),
        services={} if address is None else {INSIDE_PORT: address},
    )


def _key(task: Task, labels: Mapping[str, str]) -> Key:
    return task.id, tuple(sorted(labels.items()))


async def _undo(ready: Ready) -> None:
    await _close(ready.environment, ready.sandbox)


async def _close(environment: Environment, sandbox: Sandbox) -> None:
    try:
        await environment.close()
    finally:
        await sandbox.destroy()
