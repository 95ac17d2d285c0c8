"""The plainest agent: the real OpenAI SDK in a loop.

In an agent-driven environment it has one tool, which runs shell commands; an interactive one brings its
own tools and messages. It runs in this process, hundreds of episodes at a time; only its commands run
in the sandbox.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import openai
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from pydantic import Field

from titogym.envs.environment import (
    DONE,
    Action,
    InteractiveEnvironment,
    Observation,
    Tool,
    ToolCall,
    system,
    tool_result,
    user,
)
from titogym.envs.sandboxes.base import ExecResult, Mount, Sandbox, SandboxError
from titogym.envs.task import Task
from titogym.harnesses.base import Connection, HarnessResult, Outcome
from titogym.harnesses.failures import classify

log = logging.getLogger(__name__)

Step = Callable[[Action], Awaitable[Observation]]

SYSTEM = (
    "You solve tasks in a Linux sandbox. Use the bash tool to look around, change files and check your "
    "work. Each command runs in a new shell in {workdir}. When the task is done, answer with a short "
    "summary and no tool call."
)
TOOL_DESCRIPTION = "Run a bash command and return its output."
MALFORMED = "Your tool call could not be read. Call the bash tool with JSON arguments, one string: command."
MALFORMED_ANY = "Your tool call could not be read. Call a tool by its name, with its arguments as JSON."

# Text that only stands in an answer when the model meant to call a tool and got the syntax wrong.
CALL_MARKS = ("<tool_call", "</tool_call", "<function", "[TOOL_CALLS]", "<|tool_call")

_CONNECT_SECONDS = 30.0


class _Stop(Exception):
    def __init__(self, outcome: Outcome, detail: str) -> None:
        self.outcome: Outcome = outcome
        self.detail = detail


@dataclass(frozen=True, slots=True)
class _World:
    """Whom the model talks to: what it is told first, what answers it, and how faults of that are named."""

    first: Observation
    step: Step
    malformed: str
    fault: tuple[Outcome, str]


@dataclass
class OpenAILoop:
    """A tool loop over chat completions.

    system, tool_description, malformed: what the model reads in a shell; keep them short for a tiny
      model. `{workdir}` in `system` becomes the task's work directory; an empty system text sends none.
    command_seconds: time limit of one command (s).
    output_chars: most characters of one command's output that the model is shown.
    max_tokens: most tokens of one turn; None leaves it to the session.
    request: further fields of every request, such as `{"temperature": 0.7}`.
    retries: how often the SDK repeats a request that the gateway did not answer.
    """

    system: str = SYSTEM
    tool_description: str = TOOL_DESCRIPTION
    malformed: str = MALFORMED
    command_seconds: Annotated[float, Field(gt=0)] = 60.0
    output_chars: Annotated[int, Field(ge=0)] = 8000
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    request: dict[str, Any] = field(default_factory=dict)
    retries: Annotated[int, Field(ge=0)] = 1

    name = "openai_loop"
    matcher = "strict"
    inside = False

    def __post_init__(self) -> None:
        self._tls = httpx.create_ssl_context()  # making one takes longer than a turn
        parameters = {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        }
        self.bash = Tool("bash", self.tool_description, parameters)

    async def prepare(self) -> None:
        pass

    def mounts(self) -> tuple[Mount, ...]:
        return ()

    async def close(self) -> None:
        pass

    async def run(self, task: Task, sandbox: Sandbox, connection: Connection) -> HarnessResult:
        messages = [user(task.instruction)]
        if self.system:
            messages.insert(0, system(self.system.replace("{workdir}", task.workdir)))

        async def step(action: Action) -> Observation:
            if not action.tool_calls:
                return DONE
            answers = [tool_result(call, await self._answer(call, sandbox)) for call in action.tool_calls]
            return Observation(tuple(answers))

        world = _World(
            Observation(tuple(messages), (self.bash,)),
            step,
            self.malformed,
            ("crashed", "The sandbox failed the agent"),
        )
        return await self._attempt(task, world, connection)

    async def play(
        self, task: Task, environment: InteractiveEnvironment, first: Observation, connection: Connection
    ) -> HarnessResult:
        fault: tuple[Outcome, str] = ("environment_error", f"The environment {environment.name!r} failed")
        world = _World(first, environment.step, MALFORMED_ANY, fault)
        return await self._attempt(task, world, connection)

    async def _attempt(self, task: Task, world: _World, connection: Connection) -> HarnessResult:
        progress = {"turns": 0, "tokens": 0}
        try:
            async with asyncio.timeout(task.limits.agent_seconds), self._connect(connection) as client:
                await self._converse(task, world, client, connection.model, progress)
        except _Stop as stop:
            return HarnessResult(stop.outcome, stop.detail, metadata=progress)
        except TimeoutError:
            detail = f"The agent was stopped at its limit of {task.limits.agent_seconds:g} s."
            return HarnessResult("timeout", detail, metadata=progress)
        except openai.OpenAIError as error:
            outcome, detail = classify(error)
            return HarnessResult(outcome, detail, metadata=progress)
        return HarnessResult("finished", metadata=progress)

    @asynccontextmanager
    async def _connect(self, connection: Connection) -> AsyncIterator[openai.AsyncOpenAI]:
        """A client with a connection of its own.

        One pool for all episodes would be searched from end to end at every request: at 100 episodes
        that costs three times the CPU of the request itself.
        """
        async with httpx.AsyncClient(verify=self._tls, trust_env=False) as pool:
            yield openai.AsyncOpenAI(
                api_key=connection.api_key,
                base_url=connection.base_url,
                http_client=pool,
                max_retries=self.retries,
                timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            )

    async def _converse(
        self,
        task: Task,
        world: _World,
        client: openai.AsyncOpenAI,
        model: str,
        progress: dict[str, int],
    ) -> None:
        messages = _sendable(world.first)
        tools = [tool.as_function() for tool in world.first.tools]
        if world.first.done:
            return
        while progress["turns"] < task.limits.turns:
            completion = await self._turn(client, model, messages, tools)
            progress["turns"] += 1
            progress["tokens"] += completion.usage.completion_tokens if completion.usage else 0
            choice = completion.choices[0]
            messages.append(choice.message.to_dict())
            action = _action(choice.message)
            if not action.tool_calls and choice.finish_reason == "length":
                raise _Stop("token_limit", "A turn ran into its token limit before the model ended it.")
            if not action.tool_calls and tools and any(mark in action.content for mark in CALL_MARKS):
                messages.append({"role": "user", "content": world.malformed})
            else:
                observation = await _stepped(world, action)
                if observation.done:
                    return
                messages += _unanswered(action, observation)
                messages += _sendable(observation)
            if task.limits.tokens is not None and progress["tokens"] >= task.limits.tokens:
                raise _Stop("token_limit", f"The agent sampled its limit of {task.limits.tokens} tokens.")
        raise _Stop("turn_limit", f"The agent reached its limit of {task.limits.turns} turns.")

    async def _turn(
        self,
        client: openai.AsyncOpenAI,
        model: str,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
    ) -> ChatCompletion:
        body = {"model": model, "messages": messages, **({"tools": tools} if tools else {}), **self.request}
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        # The same request as `client.chat.completions.create(...)`, which first walks every message of
        # the history against the SDK's type hints: 4 ms of CPU at 20 messages, where this takes 0.5.
        completion: ChatCompletion = await client.post("/chat/completions", cast_to=ChatCompletion, body=body)
        return completion

    async def _answer(self, call: ToolCall, sandbox: Sandbox) -> str:
        """Run one shell call; what was wrong with it is an answer too."""
        if call.name != "bash":
            return f"error: there is no tool {call.name!r}, only 'bash'"
        try:
            command = json.loads(call.arguments)["command"]
        except (ValueError, TypeError, KeyError, RecursionError):
            command = None
        if not isinstance(command, str):
            return 'error: the arguments must be JSON like {"command": "ls"}'
        return render(await sandbox.exec(command, timeout=self.command_seconds), self.output_chars)


def _action(message: ChatCompletionMessage) -> Action:
    calls = [
        ToolCall(call.id, call.function.name, call.function.arguments)
        for call in message.tool_calls or ()
        if call.type == "function"
    ]
    return Action(message.content or "", tuple(calls))


def _unanswered(action: Action, observation: Observation) -> list[dict[str, Any]]:
    """Results for calls that the world passed over: a history with open calls would be refused."""
    answered = {message.get("tool_call_id") for message in observation.messages}
    return [
        dict(tool_result(call, f"error: there is no tool {call.name!r}"))
        for call in action.tool_calls
        if call.id not in answered
    ]


def _sendable(observation: Observation) -> list[dict[str, Any]]:
    """The messages. Half a surrogate pair, which models can write as an escape and a world repeat, is "?"."""
    text = json.dumps(observation.messages, ensure_ascii=False)
    messages: list[dict[str, Any]] = json.loads(text.encode("utf-8", "replace"))
    return messages


async def _stepped(world: _World, action: Action) -> Observation:
    """The world's answer. Raises `_Stop` where it has none: that is not the model's fault."""
    outcome, sentence = world.fault
    try:
        observation = await world.step(action)
    except SandboxError as error:
        raise _Stop(outcome, f"{sentence}: {error}") from error
    except (Exception, SystemExit) as error:  # an environment's own code
        log.error("%s", sentence, exc_info=error)
        raise _Stop(outcome, f"{sentence}: {type(error).__name__}: {error}") from error
    if not isinstance(observation, Observation):
        raise _Stop(outcome, f"{sentence}: step returned {str(observation)[:80]!r}, which is no Observation")
    return observation


def render(result: ExecResult, limit: int) -> str:
    """A command's result as the model reads it: output, then what stands out (errors, status, cuts)."""
    parts = [shorten(part.rstrip("\n"), limit) for part in (result.stdout, result.stderr) if part.strip()]
    if result.truncated:
        parts.append("[output cut: the command wrote too much]")
    if result.timed_out:
        parts.append("[timed out]")
    elif result.out_of_memory:
        parts.append("[killed: out of memory]")
    elif result.exit_code != 0:
        parts.append(f"[exit code {result.exit_code}]")
    return "\n".join(parts) or "(no output)"


def shorten(text: str, limit: int) -> str:
    """`text` with its middle left out when it is longer than `limit` characters, and a note that says so."""
    if len(text) <= limit:
        return text
    head = (limit + 1) // 2
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[len(text) - tail :]}"
