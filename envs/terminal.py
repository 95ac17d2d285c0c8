"""The terminal environment: files in a sandbox, graded by a test script that the agent never saw."""

import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal, TypeVar

from titogym.envs import dockerfile
from titogym.envs.environment import Observation, user
from titogym.envs.sandboxes.base import ExecResult, Sandbox, SandboxError
from titogym.envs.task import Grade, Task
from titogym.envs.terminal_bench import recipe_of, resolve_references
from titogym.envs.verifier import interpreter, verify
from titogym.errors import UserError

R = TypeVar("R")

SOLUTION = "/solution"


class TerminalEnvironment:
    """Runs Terminal-Bench / Harbor task directories, and tasks that carry their files and tests as texts."""

    name = "terminal"
    interactive: Literal[False] = False
    needs_sandbox = True

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
        if task.directory is not None:
            context = task.directory / "environment"
            for step in recipe_of(task.directory).steps:
                await _carry_out(step, context, sandbox, task.metadata["build_seconds"])
        if task.files:
            await sandbox.upload(task.files, task.workdir)

    async def grade(self, task: Task, sandbox: Sandbox | None) -> Grade:
        assert sandbox is not None
        if task.tests is None:
            raise UserError(f"Task {task.id} has no tests.")
        env = {**task.env, **_resolved(task, "verifier_env")}
        return await verify(sandbox, task.tests, env=env, seconds=task.limits.verifier_seconds)

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


async def _carry_out(
    step: dockerfile.Copy | dockerfile.Run, context: Path, sandbox: Sandbox, seconds: float
) -> None:
    if isinstance(step, dockerfile.Run):
        done = await sandbox.exec(step.command, cwd=step.cwd, env=step.env, timeout=seconds)
        if done.exit_code != 0:
            raise SandboxError(
                f"Line {step.line} of {context / 'Dockerfile'} failed with status {done.exit_code}: "
                f"{(done.stderr or done.stdout).strip()[-300:]}"
            )
        return
    for source, target in dockerfile.sources(context, step):
        await sandbox.upload(source, target)
        if step.mode is not None:
            await sandbox.exec(f"chmod -R {step.mode} {shlex.quote(target)}", cwd="/")


def _resolved(task: Task, key: str) -> dict[str, str]:
    return resolve_references(task.metadata.get(key, {}), f"{key.replace('_', '.')} of task {task.id}")
