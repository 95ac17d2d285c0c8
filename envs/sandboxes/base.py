"""What environments and harnesses ask of a sandbox, whatever backend makes it (see `registry`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from titogym.envs.task import Limits, Network, Task
from titogym.errors import UserError

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # no agent can write there
TIMED_OUT = 124
OUT_OF_MEMORY = 137
CANNOT_RUN = 126
LIFETIME = 3600.0  # s that a sandbox may need beyond its task's own limits: set-up, waiting, grading

Output = Callable[[Literal["stdout", "stderr"], bytes], None]


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or directory of the host that the sandbox sees, read-only, at the absolute path `target`."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class Build:
    """An image to be built from the Dockerfile in the directory `context`, within `seconds`.

    Built once; later sandboxes reuse it as long as nothing in `context` has changed.
    """

    context: Path
    seconds: float = 600.0
    dockerfile: str = "Dockerfile"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A kept file system of the backend `backend`, under the name `reference` that the backend gave it."""

    backend: str
    reference: str


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What to create. Labels name the run and the episode, so that leftovers can be found and destroyed.

    `services` are the only ways out of a sandbox without network: TCP ports on its own loopback, each
    leading to one `host:port` as the driver sees it (the gateway, for an agent that runs inside).
    `lifetime` (s after creation) is for how long a reaper that cannot see the driver spares it.
    """

    image: str | Build | Snapshot | None = None  # None: the backend's plain system
    limits: Limits = field(default_factory=Limits)
    network: Network = "none"
    workdir: str = "/workspace"
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    services: Mapping[int, str] = field(default_factory=dict)
    lifetime: float = LIFETIME

    @classmethod
    def for_task(cls, task: Task, labels: Mapping[str, str] | None = None) -> "SandboxSpec":
        """What the agent of `task` works in."""
        build = Build(task.context, task.metadata.get("build_seconds", 600.0)) if task.context else None
        return cls(
            image=task.image or build,
            limits=task.limits,
            network=task.network,
            workdir=task.workdir,
            env=task.env,
            labels={"task": task.id, **(labels or {})},
            lifetime=LIFETIME + task.limits.agent_seconds + task.limits.verifier_seconds,
        )


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What one command did. `exit_code` is 124 when `timed_out`, 137 when `out_of_memory`."""

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool = False
    out_of_memory: bool = False
    truncated: bool = False  # output beyond the cap was dropped
    running: int = 0  # processes alive in the sandbox when the command ended


@dataclass(frozen=True, slots=True)
class Reaped:
    """Ids of leftovers that were destroyed, and of those that could not be, with the reason."""

    destroyed: list[str]
    failed: dict[str, str]


class SandboxError(Exception):
    """The sandbox could not be created or has gone. The message names the cause."""


class Unsupported(UserError):
    """This backend cannot do what was asked; the message says which can, or what to change."""


class Sandbox(Protocol):
    """One isolated machine for one episode."""

    id: str
    remarks: list[str]  # oddities that a grader should know of, such as a work directory that was replaced

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        max_output: int = 1 << 20,
        on_output: Output | None = None,
    ) -> ExecResult:
        """Run a shell line (str) or an argv. On timeout (s) the whole process tree is killed.

        Keeps the first `max_output` bytes of each stream; `on_output` is called with every piece of them as
        it arrives. Files and background processes outlast the command; its directory and environment do
        not.
        """
        ...

    async def upload(self, source: Path | Mapping[str, str], target: str) -> None:
        """Lay a file, a directory or a tree of texts at the absolute path `target` inside."""
        ...

    async def download(self, source: str, target: Path) -> None:
        """Fetch the file or the directory at the absolute path `source` as `target`."""
        ...

    async def read(self, path: str, limit: int) -> bytes | None:
        """At most `limit` bytes of a regular file, None if there is none. Follows no symbolic link.

        Needs no process inside, so it works after `kill_processes`.
        """
        ...

    async def kill_processes(self) -> None:
        """Kill everything that runs inside; the file system stays."""
        ...

    async def successor(
        self, *, read_only: Mapping[str, Path | Mapping[str, str]], env: Mapping[str, str]
    ) -> "Sandbox":
        """A fresh sandbox that takes over this one's files; this one is destroyed.

        No process survives, and `/logs` is new; `read_only` maps absolute paths inside to trees that
        appear there, unwritable; `env` replaces the environment of the spec, whose mounts and services are
        gone. System directories and `/etc` are new too, or else what the agent changed there stands in the
        successor's `remarks`.
        """
        ...

    async def snapshot(self) -> Snapshot:
        """Keep the file system as it is now, for any number of later sandboxes (`SandboxSpec.image`).

        What runs inside is paused meanwhile, or killed where it cannot be.
        It is the caller's to delete, by `SandboxBackend.delete_snapshot`. Raises `Unsupported`.
        """
        ...

    async def destroy(self) -> None:
        """Kill everything and delete the file system. Safe to call twice.

        A failure is retried first. Raises `SandboxError` when something remains, which the backend then
        also lists in `undestroyed`.
        """
        ...


class Reaper(Protocol):
    """Finds what dead drivers left, by the labels that a sandbox bears from its creation on."""

    async def reap(self) -> Reaped:
        """Destroy every sandbox whose driver is dead, or cannot be seen and whose lifetime is over."""
        ...


class SandboxBackend(Reaper, Protocol):
    """Makes sandboxes. Constructed with `labels` for all of them and options of its own.

    One object serves one event loop.
    """

    name: str

    @property
    def own_loopback(self) -> bool:
        """Whether 127.0.0.1 is another machine's than the driver's in a sandbox with an open network too."""
        ...

    @property
    def undestroyed(self) -> dict[str, str]:
        """Id of each sandbox that would not go -> why."""
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Raises `UserError` (`Unsupported`) for what can never be made here, `SandboxError` for a failure.

        Nothing is left behind by a creation that fails or is cancelled.
        """
        ...

    async def delete_snapshot(self, snapshot: Snapshot) -> None:
        """Safe to call twice. Raises `Unsupported` for a snapshot of another backend."""
        ...

    async def close(self) -> None:
        """Try once more to destroy what would not go; let go of connections. Safe to call twice."""
        ...
