"""Any OpenEnv server as an environment of ours, driven by OpenEnv's own client.

What the model is offered depends on the server:

- a server of MCP tools: those tools, each call one step; an answer without a call ends the episode;
- an action that is one text: the model's answers are the actions, and observations its next messages;
- any other action: one tool, `act`, whose parameters are the server's schema of actions.

The session lives on OpenEnv's WebSocket: plain HTTP there keeps no state between steps.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import httpx

from titogym.envs import rewards
from titogym.envs.dealing import Split, deal
from titogym.envs.environment import DONE, Action, Message, Observation, Tool, ToolCall, tool_result, user
from titogym.envs.sandboxes.base import Sandbox, SandboxError
from titogym.envs.task import Grade, GradingError, Limits, Task
from titogym.errors import UserError, install_extra

if TYPE_CHECKING:
    from openenv.core import GenericEnvClient

Return = Literal["sum", "last", "max"]

_OWN_FIELDS = frozenset({"metadata", "done", "reward"})  # of every action and observation
_CONNECT_SECONDS = 20.0
_OBSERVATION_CHARACTERS = 50_000
_SEEDS = 2**31


def tasks(
    split: Split = "train",
    seed: int = 0,
    count: int = 100,
    url: str = "",
    instruction: str = "",
    reward: Return = "sum",
    turns: int = 50,
    step_seconds: float = 60.0,
    indexed: bool = False,
) -> list[Task]:
    """Episodes on the server at `url`, which differ by the seed that its reset gets.

    indexed: the server has tasks of its own (OpenEnv's task API): its reset gets `split` and `index`.
    reward: of an episode's rewards the sum, the last or the highest; it must be within [0, 1].
    """
    address = urlsplit(url)
    if address.scheme not in ("http", "https", "ws", "wss") or not address.hostname:
        raise UserError(
            f"The tasks of an OpenEnv server need its address: url=http://HOST:PORT, not {url!r}."
        )
    if reward not in ("sum", "last", "max"):
        raise UserError(f"reward is {reward!r}; it must be sum, last or max.")
    if indexed:
        resets: list[dict[str, Any]] = [{"split": split, "index": index} for index in range(count)]
    else:
        seeds = deal(f"openenv {url}", split, seed, count, lambda choose: choose.randrange(_SEEDS), str)
        resets = [{"seed": drawn} for drawn in seeds]
    return [
        Task(
            id=f"openenv-{address.hostname}-{split}-{seed}-{number}",
            instruction=instruction,
            environment="openenv",
            limits=Limits(turns=turns),
            split=split,
            metadata={"url": url, "reset": reset, "reward": reward, "step_seconds": step_seconds},
        )
        for number, reset in enumerate(resets)
    ]


class OpenEnv:
    """One session on an OpenEnv server."""

    name = "openenv"
    interactive: Literal[True] = True
    needs_sandbox = False

    def __init__(self) -> None:
        self._client: GenericEnvClient | None = None
        self._rewards: list[float] = []
        self._steps = 0
        self._text_field: str | None = None
        self._mcp = False

    async def reset(self, task: Task, sandbox: Sandbox | None) -> Observation:
        self._client = _client(task.metadata["url"], task.metadata.get("step_seconds", 60.0))
        schema = await _action_schema(task.metadata["url"])
        try:
            await self._client.connect()
            started = await self._client.reset(**task.metadata.get("reset", {}))
            tools = await self._tools(schema)
        except Exception as error:
            raise SandboxError(
                f"The OpenEnv server at {task.metadata['url']} gave no session: {error}"
            ) from error
        text = "\n\n".join(part for part in (task.instruction, _text(started.observation)) if part)
        return Observation((user(text or "Begin."),), tools, done=bool(started.done))

    async def step(self, action: Action) -> Observation:
        if self._text_field is not None:
            text, done = await self._act({self._text_field: action.content})
            return Observation((user(text),), done=done)
        if not action.tool_calls:
            return DONE
        messages: list[Message] = []
        done = False
        for call in action.tool_calls:
            text, done = ("error: the episode is over", True) if done else await self._call(call)
            messages.append(tool_result(call, text))
        return Observation(tuple(messages), done=done)

    async def grade(self, task: Task, sandbox: Sandbox | None) -> Grade:
        if not self._rewards:
            raise GradingError(f"The OpenEnv server gave no reward in {self._steps} steps.")
        how: Return = task.metadata.get("reward", "sum")
        value = {"sum": sum(self._rewards), "last": self._rewards[-1], "max": max(self._rewards)}[how]
        try:
            reward = rewards.checked(value, f"the {how} of the server's rewards")
        except GradingError as error:
            raise GradingError(
                f"{error} Take another of reward=sum, last, max, or scale them there."
            ) from None
        evidence = {"grader": "openenv", "rewards": list(self._rewards), "steps": self._steps}
        return Grade(reward, evidence)

    async def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    async def _tools(self, schema: Mapping[str, Any]) -> tuple[Tool, ...]:
        """What the model may call, and with it how its messages become actions."""
        assert self._client is not None
        fields = {
            name: field for name, field in schema.get("properties", {}).items() if name not in _OWN_FIELDS
        }
        if {"tool_name", "arguments"} <= fields.keys():
            self._mcp = True
            listed = (await self._client.step({"type": "list_tools"})).observation.get("tools", [])
            return tuple(
                Tool(tool["name"], tool.get("description") or "", tool.get("input_schema") or {})
                for tool in listed
            )
        if len(fields) == 1 and next(iter(fields.values())).get("type") == "string":
            (self._text_field,) = fields
            return ()
        parameters = {**schema, "properties": fields, "type": "object"}
        parameters.pop("title", None)
        parameters["required"] = [name for name in schema.get("required", []) if name in fields]
        return (Tool("act", "Take one step in the environment.", parameters),)

    async def _call(self, call: ToolCall) -> tuple[str, bool]:
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return "error: the arguments must be a JSON object", False
        if self._mcp:
            return await self._act({"type": "call_tool", "tool_name": call.name, "arguments": arguments})
        if call.name != "act":
            return f"error: there is no tool {call.name!r}, only act", False
        return await self._act(arguments)

    async def _act(self, action: Mapping[str, Any]) -> tuple[str, bool]:
        """One step: what the model is told, and whether the episode is over."""
        assert self._client is not None
        try:
            result = await self._client.step(dict(action))
        except RuntimeError as error:
            if "VALIDATION_ERROR" in str(error):  # the action is not one of the server's: the model's fault
                return f"error: the environment does not take this action: {error}", False
            raise SandboxError(f"The OpenEnv server failed: {error}") from error
        except Exception as error:  # the connection, or the time of a step
            raise SandboxError(
                f"The OpenEnv server did not answer: {type(error).__name__}: {error}"
            ) from error
        self._steps += 1
        if result.reward is not None:
            try:
                self._rewards.append(float(result.reward))
            except (TypeError, ValueError):
                raise SandboxError(
                    f"The OpenEnv server failed: its reward is {str(result.reward)[:80]!r}, no number."
                ) from None
        return _text(result.observation), bool(result.done)


def _client(url: str, seconds: float) -> "GenericEnvClient":
    try:
        from openenv.core import GenericEnvClient
    except ImportError:
        raise UserError(
            f"OpenEnv servers need OpenEnv's client: {install_extra('openenv')}, best in an environment "
            "of its own."
        ) from None
    return GenericEnvClient(base_url=url, connect_timeout_s=_CONNECT_SECONDS, message_timeout_s=seconds)


async def _action_schema(url: str) -> dict[str, Any]:
    """The JSON schema of the server's actions. Raises `SandboxError`."""
    address = url.rstrip("/").replace("ws://", "http://", 1).replace("wss://", "https://", 1) + "/schema"
    try:
        async with httpx.AsyncClient(timeout=_CONNECT_SECONDS) as client:
            answer = await client.get(address)
            schema = answer.raise_for_status().json()["action"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise SandboxError(
            f"{address} does not describe the actions of an OpenEnv server: {error}"
        ) from error
    if not isinstance(schema, dict):
        raise SandboxError(f"{address} does not describe the actions of an OpenEnv server.")
    return schema


def _text(observation: Mapping[str, Any]) -> str:
    """An observation as the model reads it: its only text, the result of a tool, or else JSON."""
    fields = {
        name: value
        for name, value in observation.items()
        if name not in _OWN_FIELDS and value is not None and value != ""
    }
    if "tool_name" in fields:
        return _cut(_result(fields))
    if len(fields) == 1 and isinstance(only := next(iter(fields.values())), str):
        return _cut(only)
    return _cut(json.dumps(fields, ensure_ascii=False)) if fields else ""


def _result(fields: Mapping[str, Any]) -> str:
    """What an MCP tool answered."""
    if error := fields.get("error"):
        message = error.get("message") if isinstance(error, dict) else error
        return f"error: {message}"
    result = fields.get("result")
    if isinstance(result, dict) and isinstance(content := result.get("content"), list):
        texts = [
            part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        ]
        if texts:
            return "\n".join(texts)
    if isinstance(result, dict) and "data" in result:
        result = result["data"]
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _cut(text: str) -> str:
    return text if len(text) <= _OBSERVATION_CHARACTERS else text[:_OBSERVATION_CHARACTERS] + " [cut]"
