"""What environments and harnesses ask of a sandbox. Backends: `local` (bubblewrap)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from titogym.envs.task import Limits


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
    limits: Limits = Limits()
    network: Literal["none", "open"] = "none"
    workdir: str = "/workspace"
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    services: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What one command did. `exit_code` is 124 when `timed_out`, 137 when `out_of_memory`."""

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool = False
    out_of_memory: bool = False
    truncated: bool = False  # output beyond the cap was dropped


class SandboxError(Exception):
    """The sandbox could not be created or has gone. The message names the cause."""


class Sandbox(Protocol):
    """One isolated machine for one episode."""

    id: str

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
        """Run a shell line (str) or an argv. On timeout (s) the whole process tree is killed."""
        ...

    async def upload(self, source: Path | Mapping[str, str], target: str) -> None:
        """Lay a file, a directory or a tree of texts at the absolute path `target` inside."""
        ...

    async def download(self, source: str, target: Path) -> None: ...

    async def kill_processes(self) -> None:
        """Kill everything that runs inside; the file system stays."""
        ...

    async def destroy(self) -> None:
        """Kill everything and delete the file system. Safe to call twice."""
        ...


class SandboxBackend(Protocol):
    async def create(self, spec: SandboxSpec) -> Sandbox: ...
