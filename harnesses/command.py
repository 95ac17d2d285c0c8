"""Any program as an agent, by its command line."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from titogym.envs.sandboxes.base import Mount, Sandbox
from titogym.envs.task import Task
from titogym.errors import UserError
from titogym.harnesses.base import Connection, HarnessResult
from titogym.harnesses.program import INSTRUCTION_FILE, run_program


@dataclass
class Command:
    """Runs `command` inside the sandbox, where a loopback port leads to the gateway and nothing else does.

    command: shell-like words, or a list of them; no shell runs, so write `sh -c '...'` for one. In each
      word `{instruction}`, `{instruction_file}`, `{base_url}`, `{api_key}` and `{model}` are filled in.
      The same is told by OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and so on.
    mount: host path -> path inside, read-only: where the program lives.
    env: further environment variables.
    matcher: how the program's replayed history is recognised; `call_id` bears most rewriting.
    policy: `branching` bears sub-agents, side requests and compaction; `linear` refuses them.

    Exit status 0 is a finished attempt, any other a crash.
    """

    command: str | Sequence[str]
    mount: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    matcher: str = "call_id"
    policy: str = "branching"

    name = "command"
    inside = True

    def __post_init__(self) -> None:
        try:
            self._words = shlex.split(self.command) if isinstance(self.command, str) else list(self.command)
        except ValueError as error:
            raise UserError(f"The command {self.command!r} cannot be split into words: {error}.") from error
        if not self._words:
            raise UserError("The command harness needs a command: say what to run.")
        for source in self.mount:
            if not Path(source).exists():
                raise UserError(f"The command harness is to mount {source}, which does not exist.")

    async def prepare(self) -> None:
        pass

    def mounts(self) -> tuple[Mount, ...]:
        return tuple(Mount(Path(source).resolve(), target) for source, target in self.mount.items())

    async def run(self, task: Task, sandbox: Sandbox, connection: Connection) -> HarnessResult:
        return await run_program(
            self._arguments(task, connection),
            name=self.name,
            task=task,
            sandbox=sandbox,
            connection=connection,
            env=self.env,
        )

    async def close(self) -> None:
        pass

    def _arguments(self, task: Task, connection: Connection) -> list[str]:
        values = {
            "{instruction}": task.instruction,
            "{instruction_file}": INSTRUCTION_FILE,
            "{base_url}": connection.base_url,
            "{api_key}": connection.api_key,
            "{model}": connection.model,
        }
        return [fill(word, values) for word in self._words]


def fill(word: str, values: Mapping[str, str]) -> str:
    """Replace each key of `values` where it stands in `word`; what was put in is not looked at again."""
    at, found = min(((word.find(key), key) for key in values if key in word), default=(-1, ""))
    if at < 0:
        return word
    return word[:at] + values[found] + fill(word[at + len(found) :], values)
