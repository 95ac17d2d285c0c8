"""Our environments as an OpenEnv server, which OpenEnv's own client can drive.

A session is one episode after another. An action is one assistant message of Chat Completions; an
observation the messages that come next and the tools that may be called. The reward is in the observation
that ends an episode. Tasks whose agent works by itself get a `bash` tool, and end with the first message
that calls none.
"""

import asyncio
import itertools
import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from titogym.cancellation import to_its_end
from titogym.envs import environment as env
from titogym.envs import registry
from titogym.envs.rewards import verified
from titogym.envs.sandboxes.base import Sandbox, SandboxBackend, SandboxSpec
from titogym.envs.task import GradingError, Task
from titogym.envs.tools import Toolbox
from titogym.errors import UserError, install_extra

if TYPE_CHECKING:
    from fastapi import FastAPI

_COMMAND_SECONDS = 120.0
_COMMAND_BYTES = 16_000
_CLOSE_SECONDS = 60.0


@dataclass(slots=True)
class Episode:
    """One attempt at one task by whoever is connected."""

    task: Task
    backend: SandboxBackend
    steps: int = 0
    done: bool = False
    reward: float | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    _environment: Any = None
    _sandbox: Sandbox | None = None
    _bash: Toolbox | None = None

    async def begin(self) -> env.Observation:
        self._environment = registry.environment(self.task.environment)
        if self._environment.needs_sandbox:
            self._sandbox = await self.backend.create(SandboxSpec.for_task(self.task, {"purpose": "openenv"}))
        first: env.Observation = await self._environment.reset(self.task, self._sandbox)
        if not self._environment.interactive:
            self._bash = Toolbox(self.bash)
            first = env.Observation(first.messages, self._bash.tools)
        return first

    async def step(self, action: env.Action) -> env.Observation:
        """The next observation; with the last one the reward is there."""
        if self.done:
            raise ValueError("the episode is over: reset before the next step")
        self.steps += 1
        if self._bash is not None:
            seen = env.Observation(await self._bash.answer(action)) if action.tool_calls else env.DONE
        else:
            seen = await self._environment.step(action)
        if seen.done or self.steps >= self.task.limits.turns:
            seen = env.Observation(seen.messages, done=True)
            await self._grade()
        return seen

    async def bash(self, command: str) -> str:
        """Run a bash command and return its output."""
        assert self._sandbox is not None
        done = await self._sandbox.exec(command, timeout=_COMMAND_SECONDS, max_output=_COMMAND_BYTES)
        text = (done.stdout + done.stderr).rstrip()
        return f"{text}\n[exit status {done.exit_code}]" if done.exit_code else text

    async def end(self) -> None:
        self.done = True
        if self._environment is not None:
            environment, self._environment = self._environment, None
            await environment.close()
        if self._sandbox is not None:
            sandbox, self._sandbox = self._sandbox, None
            await sandbox.destroy()

    async def _grade(self) -> None:
        try:
            if self._sandbox is not None:
                await self._sandbox.kill_processes()
            grade = verified(await self._environment.grade(self.task, self._sandbox), self._environment.name)
            self.reward, self.evidence = grade.reward, grade.evidence
        except GradingError as error:
            self.evidence = {"error": str(error)}
        finally:
            await self.end()


def application(tasks: Sequence[Task], backend: SandboxBackend, sessions: int = 16) -> "FastAPI":
    """A FastAPI application with OpenEnv's routes. `sessions` are served at once.

    A reset takes the task `index` where it says one (with `split`, of that split's), else the one that its
    `seed` falls on, else the next. Raises `UserError` without OpenEnv or without tasks.
    """
    try:
        from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
    except ImportError:
        raise UserError(
            f"Serving needs OpenEnv: {install_extra('openenv')}, best in an environment of its own."
        ) from None
    from pydantic import BaseModel, ConfigDict, Field

    if not tasks:
        raise UserError("There are no tasks to serve.")
    turn = itertools.count()

    class Call(BaseModel):
        model_config = ConfigDict(extra="ignore")
        id: str = ""
        name: str
        arguments: str | dict[str, Any] = "{}"

    class Message(Action):  # type: ignore[misc, unused-ignore]
        """One assistant message: its text, and the tools that it calls."""

        content: str = ""
        tool_calls: list[Call] = Field(default_factory=list)

    class Told(Observation):  # type: ignore[misc, unused-ignore]
        """The messages that come next, and on reset the tools that may be called."""

        messages: list[dict[str, Any]] = Field(default_factory=list)
        tools: list[dict[str, Any]] = Field(default_factory=list)
        task_id: str = ""
        evidence: dict[str, Any] = Field(default_factory=dict)

    class Session(Environment):  # type: ignore[misc, unused-ignore]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._episode: Episode | None = None
            self._name: str | None = None
            self._loop: asyncio.AbstractEventLoop | None = None

        async def reset_async(
            self,
            seed: int | None = None,
            episode_id: str | None = None,
            index: int | None = None,
            split: str | None = None,
            **options: Any,
        ) -> Told:
            await self._end()
            self._loop = asyncio.get_running_loop()
            self._name = episode_id
            self._episode = Episode(chosen(seed, index, split), backend)
            try:
                return self._told(await self._episode.begin())
            except BaseException:
                await to_its_end(self._end())
                raise

        async def step_async(self, action: Any, timeout_s: float | None = None, **options: Any) -> Told:
            if self._episode is None:
                raise ValueError("reset before the first step")
            try:
                return self._told(await self._episode.step(assistant_message(action)))
            except ValueError:
                raise
            except BaseException:  # the episode is lost
                await to_its_end(self._end())
                raise

        def reset(self, *arguments: Any, **options: Any) -> Told:
            raise NotImplementedError("the server calls reset_async")

        def step(self, *arguments: Any, **options: Any) -> Told:
            raise NotImplementedError("the server calls step_async")

        @property
        def state(self) -> State:
            episode = self._episode
            known = {"task_id": episode.task.id, "done": episode.done} if episode else {}
            return State(episode_id=self._name, step_count=episode.steps if episode else 0, **known)

        def close(self) -> None:
            """Called from a thread of the server's when the client has gone."""
            if self._episode is not None and self._loop is not None and not self._loop.is_closed():
                ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
                try:
                    asyncio.get_running_loop()
                except RuntimeError:
                    ending.result(_CLOSE_SECONDS)

        async def _end(self) -> None:
            if self._episode is not None:
                episode, self._episode = self._episode, None
                await episode.end()

        def _told(self, seen: env.Observation) -> Told:
            assert self._episode is not None
            return Told(
                messages=[dict(message) for message in seen.messages],
                tools=[tool.as_function() for tool in seen.tools],
                done=seen.done,
                reward=self._episode.reward,
                task_id=self._episode.task.id,
                evidence=json.loads(json.dumps(self._episode.evidence, default=str)),
            )

    def chosen(seed: int | None, index: int | None, split: str | None) -> Task:
        among = [task for task in tasks if split in (None, task.split)]
        if not among:
            raise ValueError(f"there are no tasks of the split {split!r}")
        if index is not None:
            if not 0 <= index < len(among):
                raise ValueError(f"index is {index}; there are {len(among)} tasks")
            return among[index]
        return among[(next(turn) if seed is None else seed) % len(among)]

    return create_fastapi_app(Session, Message, Told, max_concurrent_envs=sessions)


def serve(
    tasks: Sequence[Task],
    backend: SandboxBackend,
    *,
    host: str,
    port: int,
    sessions: int,
    report: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until interrupted. `report` is told the address once it listens. Raises `UserError`."""
    import uvicorn

    app = application(tasks, backend, sessions)
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise UserError(f"Cannot listen at {host}:{port}: {error.strerror}.") from None
    report(f"http://{host}:{listener.getsockname()[1]}")
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


def assistant_message(action: Any) -> env.Action:
    """Our form of an action from the wire. A call without an id gets one."""
    calls = [
        env.ToolCall(
            call.id or f"call_{number}",
            call.name,
            call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments),
        )
        for number, call in enumerate(action.tool_calls)
    ]
    return env.Action(action.content, tuple(calls))
