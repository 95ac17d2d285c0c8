"""What `test_openenv` runs in the environment that has OpenEnv: real servers, the real client, both ways.

Prints one JSON object: the name of each check with what came out.
"""

# mypy: ignore-errors
# (OpenEnv is not installed where mypy runs.)

import asyncio
import json
import socket
import sys
import threading
import time
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

from titogym.envs import environment as env
from titogym.envs import registry
from titogym.envs.openenv.server import application
from titogym.envs.sandboxes.base import SandboxError
from titogym.envs.sandboxes.local import LocalBackend
from titogym.envs.task import GradingError

# --- servers of OpenEnv's own kind


class Say(Action):
    message: str


class Heard(Observation):
    echoed: str = ""


class Echo(Environment):
    """One text in, one text out; over when it hears the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.seed, self.steps = seed, 0
        return Heard(echoed=f"say {seed}")

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        right = action.message == str(self.seed)
        return Heard(echoed=action.message, done=right, reward=1.0 if right else 0.0)

    @property
    def state(self):
        return State(step_count=self.steps)


class Move(Action):
    direction: str
    far: int = 1


class Place(Observation):
    x: int = 0
    wall: bool = False


class Corridor(Environment):
    """A structured action. Each step right gives 0.25; it fails at -1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.x = 0
        return Place()

    def step(self, action, timeout_s=None, **kwargs):
        self.x += action.far if action.direction == "right" else -action.far
        if self.x < 0:
            raise RuntimeError("fell off")
        return Place(x=self.x, wall=self.x == 4, done=self.x == 4, reward=0.25)

    @property
    def state(self):
        return State()


class Calculator(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("calculator")

        @server.tool()
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.right = False
        return Observation(metadata={"ready": True})

    async def step_async(self, action, timeout_s=None, **kwargs):
        seen = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction) and action.arguments.get("a") == 20:
            seen.reward = 1.0
        return seen

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation()

    @property
    def state(self):
        return State()


def serve(app) -> str:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    threading.Thread(target=server.run, args=([listener],), daemon=True).start()
    while not server.started:
        time.sleep(0.02)
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


# --- our environment over their servers


async def play(source: str, actions, number: int = 0) -> dict[str, Any]:
    task = registry.tasks(source)[number]
    environment = registry.environment("openenv")
    seen = []
    try:
        observation = await environment.reset(task, None)
        seen.append([message["content"] for message in observation.messages])
        out: dict[str, Any] = {"tools": [tool.as_function()["function"] for tool in observation.tools]}
        for action in actions:
            observation = await environment.step(action(task) if callable(action) else action)
            seen.append([message["content"] for message in observation.messages])
            if observation.done:
                break
        grade = await environment.grade(task, None)
        return out | {"seen": seen, "done": observation.done, "reward": grade.reward, **grade.evidence}
    except (SandboxError, GradingError) as error:
        return {"seen": seen, "error": f"{type(error).__name__}: {error}"}
    finally:
        await environment.close()


def call(name: str, arguments: Any) -> env.Action:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return env.Action(tool_calls=(env.ToolCall("c", name, text),))


async def theirs() -> dict[str, Any]:
    echo = serve(create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=2))
    corridor = serve(create_fastapi_app(Corridor, Move, Place, max_concurrent_envs=1))
    calculator = serve(
        create_fastapi_app(Calculator, CallToolAction, CallToolObservation, max_concurrent_envs=4)
    )
    right = call("act", {"direction": "right"})
    checks = {
        "text": await play(
            f"openenv?url={echo}&count=3",
            [env.Action("hello"), lambda task: env.Action(str(task.metadata["reset"]["seed"]))],
            number=2,
        ),
        "structured": await play(f"openenv?url={corridor}&instruction=Walk.", [right, right, right, right]),
        "wrong actions": await play(
            f"openenv?url={corridor}",
            [call("act", "{"), call("act", [1]), call("fly", {}), call("act", {"speed": 1}), right],
        ),
        "no action": await play(f"openenv?url={corridor}", [env.Action("I give up")]),
        "their fault": await play(f"openenv?url={corridor}", [call("act", {"direction": "left"})]),
        "too much": await play(
            f"openenv?url={corridor}&reward=max", [call("act", {"direction": "right", "far": 4})]
        ),
        "mcp": await play(
            f"openenv?url={calculator}&reward=max",
            [call("add", {"a": 20, "b": 22}), call("add", {"a": "x"}), call("none", {}), env.Action("42")],
        ),
        "nobody there": await play("openenv?url=http://127.0.0.1:9", []),
    }
    first = registry.environment("openenv")
    await first.reset(registry.tasks(f"openenv?url={corridor}")[0], None)
    checks["full"] = await play(f"openenv?url={corridor}", [right])
    await first.close()
    return checks


# --- their client over our environments


async def drive(url: str, policy, **reset: Any) -> dict[str, Any]:
    client = GenericEnvClient(base_url=url)
    await client.connect()
    try:
        result = await client.reset(**reset)
        first = result.observation
        for _ in range(20):
            if result.done:
                break
            result = await client.step(policy(result.observation))
        state = await client.state()
        return {"first": first, "last": result.observation, "reward": result.reward, "done": result.done} | {
            "steps": state["step_count"]
        }
    except RuntimeError as error:
        return {"error": str(error)}
    finally:
        await client.close()


async def ours(program: asyncio.subprocess.Process) -> dict[str, Any]:
    backend = LocalBackend()
    sums = registry.tasks("arithmetic?count=4&level=1")
    arithmetic = serve(application(sums, backend, sessions=8))
    answers = {task.id: str(task.metadata["answer"]) for task in sums}
    shell = serve(application(registry.tasks("starter?count=1"), backend, sessions=2))
    checks = {
        "right": await drive(arithmetic, lambda seen: {"content": answers[seen["task_id"]]}, index=2),
        "wrong": await drive(arithmetic, lambda seen: {"content": "-1"}, seed=5),
        "no such task": await drive(arithmetic, lambda seen: {}, index=4),
        "no such action": await drive(arithmetic, lambda seen: {"text": "x"}),
    }
    calls = iter([{"a": 2, "operation": "*", "b": 21}])

    def calculate(seen: dict[str, Any]) -> dict[str, Any]:
        if arguments := next(calls, None):
            return {"tool_calls": [{"name": "calculate", "arguments": arguments}]}
        return {"content": seen["messages"][-1]["content"]}

    checks["tools"] = await drive(arithmetic, calculate, index=0)
    many = [
        drive(arithmetic, lambda seen: {"content": answers[seen["task_id"]]}, index=n % 4) for n in range(8)
    ]
    checks["at once"] = {"rewards": [one.get("reward") for one in await asyncio.gather(*many)]}
    solution = (registry.STARTER / "csv-totals" / "solution" / "solve.sh").read_text()
    commands = iter([solution, "echo done; exit 3"])

    def work(seen: dict[str, Any]) -> dict[str, Any]:
        command = next(commands, None)
        if command is None:
            return {"content": "Done."}
        return {"tool_calls": [{"name": "bash", "arguments": json.dumps({"command": command})}]}

    checks["sandbox"] = await drive(shell, work)
    leaving = GenericEnvClient(base_url=shell)  # a client that goes away in the middle
    await leaving.connect()
    await leaving.reset()
    await leaving.close()
    try:
        assert program.stdout is not None
        line = (await program.stdout.readline()).decode()
        low, high = 0, 2000

        def guess(seen: dict[str, Any]) -> dict[str, Any]:
            nonlocal low, high
            words = seen["messages"][-1]["content"].split()
            if "from" in words:
                at = words.index("from")
                low, high = int(words[at + 1]), int(words[at + 3].strip("."))
            elif "low." in words:
                low = int(words[0]) + 1
            else:
                high = int(words[0]) - 1
            return {"content": str((low + high) // 2)}

        deadline = time.monotonic() + 60
        url = line.split()[-1]
        while time.monotonic() < deadline:
            try:
                checks["command"] = {"line": line, **(await drive(url, guess))}
                break
            except OSError:
                await asyncio.sleep(0.2)
    finally:
        program.terminate()
        await program.wait()
    return checks


async def main() -> None:
    # It imports all of OpenEnv as well, so it begins first.
    program = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "titogym", "env", "serve", "guess?count=1", "--port", "0"],
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        print(json.dumps({"theirs": await theirs(), "ours": await ours(program)}))
    finally:
        if program.returncode is None:
            program.kill()


if __name__ == "__main__":
    asyncio.run(main())
