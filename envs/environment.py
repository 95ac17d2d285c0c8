"""What an environment is: a world that one episode happens in, and how that episode is graded.

There are two kinds, and an environment says in data which it is:

- *agent-driven* (`interactive = False`): an agent program works in the sandbox by itself, with whatever
  tools it brings; the environment lays the files out before and grades what is left after. Any harness
  can attempt such a task.
- *interactive* (`interactive = True`): the environment answers the model turn by turn. It offers tools,
  gets the assistant's message as an `Action`, and returns an `Observation`. Harnesses that can `play`
  attempt such a task (`openai_loop` does).

One object serves one episode, in this order: `reset`, then `step`s or `run`, `grade`, `close`. It may keep
what it needs in itself. Tasks, observations, actions and grades are data, and can be pickled.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from titogym.envs.sandboxes.base import Sandbox
from titogym.envs.task import Grade, Task

R = TypeVar("R")

Message = Mapping[str, Any]  # a message of Chat Completions: role, content, tool_call_id, ...


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    def as_function(self) -> dict[str, Any]:
        """As an entry of `tools` in a Chat Completions request."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it: `arguments` is meant to be JSON, and may be anything."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Action:
    """One assistant message: its text, and the tools that it calls."""

    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """What the model is told next.

    messages: new messages. After an action with tool calls they begin with one `tool_result` per call,
      in the order of the calls (unless `done`).
    tools: what the model may call. Those of `reset` hold for the whole episode: the tools stand at the
      head of the prompt, and other tools would be another conversation.
    done: the episode is over, and `messages` are not sent to the model any more.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    done: bool = False


DONE = Observation(done=True)


class Environment(Protocol):
    """What both kinds have. Registered by name, entry point or dotted path (see `registry`).

    `needs_sandbox` says whether `reset` and `grade` are given a sandbox; agent-driven ones always need it.
    """

    name: str
    interactive: bool
    needs_sandbox: bool

    async def reset(self, task: Task, sandbox: Sandbox | None) -> Observation:
        """Make the world of `task` in a fresh sandbox, and say what the model is told first.

        It takes none of the agent's time and may come long before the agent's first turn. Raises
        `SandboxError` or `UserError` when it cannot.
        """
        ...

    async def grade(self, task: Task, sandbox: Sandbox | None) -> Grade:
        """Judge the episode. The agent's processes are dead, and it never runs again.

        The sandbox may be used up by this. Raises `GradingError` where there is no valid reward.
        """
        ...

    async def close(self) -> None:
        """Let go of what `reset` opened. Called once per object, whatever happened before."""
        ...


class AgentEnvironment(Environment, Protocol):
    """The agent drives."""

    interactive: Literal[False]

    async def run(self, task: Task, agent: Callable[[Task], Awaitable[R]]) -> R:
        """Let the agent work, by `await agent(task)` for most. Returns what the (last) call returned.

        An environment of several stages calls it once per stage, each with the stage's instruction.
        The task's limits hold for all of it together.
        """
        ...


class InteractiveEnvironment(Environment, Protocol):
    """The environment answers every turn of the model."""

    interactive: Literal[True]

    async def step(self, action: Action) -> Observation:
        """Take the model's message, and say what it is told next or that the episode is over.

        Whatever the model wrote is answered: a wrong call is told so in its result. Raises `SandboxError`,
        or anything else, only for faults that are not the model's.
        """
        ...


def user(text: str) -> Message:
    """A message from the world at large."""
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def tool_result(call: ToolCall, text: str) -> Message:
    """The answer to one call."""
    return {"role": "tool", "tool_call_id": call.id, "content": text}
