"""The terminal environment: files in a sandbox, graded by a test script that the agent never saw."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

from titogym.envs import touched
from titogym.envs.environment import Observation, user
from titogym.envs.sandboxes.base import ExecResult, Sandbox, SandboxError
from titogym.envs.scrub import scrub
from titogym.envs.task import Grade, Task
from titogym.envs.terminal_bench import resolve_references
from titogym.envs.verifier import interpreter, verify
from titogym.errors import UserError

R = TypeVar("R")

SOLUTION = "/solution"


class TerminalEnvironment:
    """Runs Terminal-Bench / Harbor task directories, and tasks that carry their files and tests as texts."""

    name = "terminal"
    interactive: Literal[False] = False
    needs_sandbox = True

    def __init__(self) -> None:
        self._before: touched.Touchable = {}

    async def reset(self, task: Task, sandbox: Sandbox | None) -> Observation:
        assert sandbox is not None
        await self.setup(task, sandbox)
        return Observation((user(task.instruction),))

    async def run(self, task: Task, agent: Callable[[Task], Awaitable[R]]) -> R:
        return await agent(task)

    async def close(self) -> None:
        pass

    async def setup(self, task: Task, sandbox: Sandbox) -> None:
        """Lay the task's files into a fresh sandbox. Raises `SandboxError` when it cannot."""
        if task.files:
            await sandbox.upload(task.files, task.workdir)
        await scrub(sandbox, task.metadata.get("scrub", ()))
        if check := task.metadata.get("healthcheck"):
            await _healthy(check, sandbox)
        self._before = await touched.look(sandbox, task.workdir)

    async def grade(self, task: Task, sandbox: Sandbox | None) -> Grade:
        assert sandbox is not None
        if task.tests is None:
            raise UserError(f"Task {task.id} has no tests.")
        seen = await self._touched(task, sandbox)
        env = {**task.env, **_resolved(task, "verifier_env")}
        grade = await verify(sandbox, task.tests, env=env, seconds=task.limits.verifier_seconds)
        return replace(grade, evidence={**grade.evidence, "touched": seen})

    async def _touched(self, task: Task, sandbox: Sandbox) -> list[str]:
        try:
            return touched.changes(self._before, await touched.look(sandbox, task.workdir))
        except SandboxError as error:  # its disk is full, say: the tests will still judge it
            return [f"not known: {error}"]

    async def solve(self, task: Task, sandbox: Sandbox) -> ExecResult:
        """Run the task's own solution, as its author meant it to be run. Raises `UserError` without one."""
        if task.solution is None:
            raise UserError(f"Task {task.id} has no solution/solve.sh.")
        await sandbox.upload(task.solution, SOLUTION)
        return await sandbox.exec(
            [*interpreter(task.solution, "solve.sh"), f"{SOLUTION}/solve.sh"],
            timeout=task.limits.agent_seconds,
            env=_resolved(task, "solution_env"),
        )


async def _healthy(check: Mapping[str, Any], sandbox: Sandbox) -> None:
    """Run the task's health check until it succeeds. Raises `SandboxError` when it fails too often."""
    started = time.monotonic()
    failures = 0
    while True:
        done = await sandbox.exec(check["command"], timeout=check["timeout_sec"])
        if done.exit_code == 0:
            return
        starting = time.monotonic() - started < check["start_period_sec"]
        failures += not starting
        if failures >= check["retries"]:
            raise SandboxError(
                f"The health check {check['command']!r} failed {failures} times: "
                f"{(done.stderr or done.stdout).strip()[-300:] or f'status {done.exit_code}'}"
            )
        await asyncio.sleep(check["start_interval_sec" if starting else "interval_sec"])


def _resolved(task: Task, key: str) -> dict[str, str]:
    return resolve_references(task.metadata.get(key, {}), f"{key.replace('_', '.')} of task {task.id}")
