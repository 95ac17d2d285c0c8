"""What environments and harnesses ask of a sandbox. Backends: `local` (bubblewrap)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from titogym.envs.task import Limits, Task

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # no agent can write there


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or directory of the host that the sandbox sees, read-only, at the absolute path `target`."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What to create. Labels name the run and the episode, so that leftovers can be found and destroyed.

    `services` are the only ways out of a sandbox without network: TCP ports on its own loopback, each
    leading to one `host:port` as the driver sees it (the gateway, for an agent that runs inside).
    """

    image: str | None = None  # None: the backend's plain system
    limits: Limits = field(default_factory=Limits)
    network: Literal["none", "open"] = "none"
    workdir: str = "/workspace"
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    services: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def for_task(cls, task: Task, labels: Mapping[str, str] | None = None) -> "SandboxSpec":
        """What the agent of `task` works in."""
        return cls(
            limits=task.limits,
            network=task.network,
            workdir=task.workdir,
            env=task.env,
            labels={"task": task.id, **(labels or {})},
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


class SandboxError(Exception):
    """The sandbox could not be created or has gone. The message names the cause."""


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
    ) -> ExecResult:
        """Run a shell line (str) or an argv. On timeout (s) the whole process tree is killed.

        Keeps the first `max_output` bytes of each stream. Files and background processes outlast the
        command; its directory and environment do not.
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

        No process survives. System directories, `/etc` and `/logs` are new; `read_only` maps absolute paths
        inside to trees that appear there, unwritable; `env` replaces the environment of the spec, whose
        mounts and services are gone.
        """
        ...

    async def destroy(self) -> None:
        """Kill everything and delete the file system. Safe to call twice."""
        ...


class SandboxBackend(Protocol):
    async def create(self, spec: SandboxSpec) -> Sandbox: ...
