"""What a harness is: an agent program that is pointed at a base URL and let loose on a task."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from titogym.envs.sandboxes.base import Sandbox
from titogym.envs.task import Task

Outcome = Literal["finished", "turn_limit", "token_limit", "context_limit", "timeout", "crashed"]


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the agent finds its model. `base_url` ends in `/v1`; `api_key` is the session's own secret."""

    base_url: str
    api_key: str
    model: str
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HarnessResult:
    """How the agent's run ended. `detail` is one sentence for a person; `log` the tail of its output."""

    outcome: Outcome
    detail: str = ""
    log: str = ""
    exit_code: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


class Harness(Protocol):
    """One way to run an agent. `matcher` is the tightest session matcher that holds it."""

    name: str
    matcher: str

    async def prepare(self) -> None:
        """Install what the agent needs (once per process). Raises `UserError` when it cannot."""
        ...

    async def run(self, task: Task, sandbox: Sandbox, connection: Connection) -> HarnessResult:
        """Let the agent work on `task` until it ends or a limit of `task.limits` stops it."""
        ...
