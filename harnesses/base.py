"""What a harness is: an agent program that is pointed at a base URL and let loose on a task."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from titogym.envs.environment import InteractiveEnvironment, Observation
from titogym.envs.sandboxes.base import Mount, Sandbox
from titogym.envs.task import Task

Outcome = Literal[
    "finished",
    "turn_limit",
    "token_limit",
    "context_limit",
    "timeout",
    "engine_error",
    "environment_error",
    "crashed",
]


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the agent finds its model. `base_url` ends in `/v1`; `api_key` is the session's own secret."""

    base_url: str
    api_key: str
    model: str
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def anthropic_base_url(self) -> str:
        """For Anthropic's SDKs, which add `/v1` themselves."""
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class HarnessResult:
    """How the agent's run ended. `detail` is one sentence for a person; `log` the tail of its output."""

    outcome: Outcome
    detail: str = ""
    log: str = ""
    exit_code: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


class Harness(Protocol):
    """One way to run an agent. `matcher` is the tightest session matcher that holds it.

    A harness may also have a `policy`, that of its sessions: `linear` unless it says `branching`, which
    serves sub-agents, side requests and compaction.

    `inside` says where the agent's program runs: in the sandbox, which then gets a loopback port that
    leads to the gateway, or in this process, with only its commands in the sandbox. One object serves
    any number of episodes at once.
    """

    name: str
    matcher: str
    inside: bool

    async def prepare(self) -> None:
        """Install what the agent needs (safe to call again). Raises `UserError` when it cannot."""
        ...

    def mounts(self) -> tuple[Mount, ...]:
        """What of the host the agent's program needs to see inside the sandbox, read-only."""
        ...

    async def run(self, task: Task, sandbox: Sandbox, connection: Connection) -> HarnessResult:
        """Let the agent work on `task` until it ends or a limit of `task.limits` stops it.

        Never raises for what the agent, its model or its sandbox does wrong: the result says it.
        """
        ...

    async def close(self) -> None:
        """Let go of what `prepare` and `run` opened. Safe to call twice."""
        ...


@runtime_checkable
class Player(Protocol):
    """A harness that can also attempt the tasks of interactive environments."""

    async def play(
        self, task: Task, environment: InteractiveEnvironment, first: Observation, connection: Connection
    ) -> HarnessResult:
        """Show the model what `environment` says, and `step` it by what the model answers, until it is done.

        `first` is what `reset` returned. Limits and failures are as in `Harness.run`; a `step` that raises
        is the outcome `environment_error`.
        """
        ...
