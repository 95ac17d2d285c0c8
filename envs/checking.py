"""Is a task sound? Its solution must score 1 and doing nothing must score 0, every time it is tried."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from titogym.envs.sandboxes.base import SandboxBackend, SandboxError, SandboxSpec, Unsupported
from titogym.envs.task import GradingError, Task
from titogym.envs.terminal import TerminalEnvironment
from titogym.envs.terminal_bench import load_task
from titogym.errors import UserError


@dataclass(frozen=True, slots=True)
class Trials:
    """The rewards of repeated attempts; an attempt that could not be graded is a sentence instead."""

    wanted: float
    results: tuple[float | str, ...]

    @property
    def right(self) -> bool:
        return all(result == self.wanted for result in self.results)

    @property
    def flaky(self) -> bool:
        """Attempts that differ: sometimes right, sometimes not, or graded in different ways."""
        return len({result if isinstance(result, float) else "error" for result in self.results}) > 1

    @property
    def summary(self) -> str:
        rewards = [f"{result:g}" if isinstance(result, float) else "error" for result in self.results]
        return " ".join(rewards)


@dataclass(frozen=True, slots=True)
class Report:
    name: str
    solution: Trials
    nothing: Trials
    refused: str = ""

    @property
    def sound(self) -> bool:
        return not self.refused and self.solution.right and self.nothing.right

    @property
    def verdict(self) -> str:
        """One sentence; the first thing that is wrong."""
        if self.sound:
            return "sound"
        if self.refused:
            return self.refused
        for trials, what in ((self.solution, "the solution"), (self.nothing, "doing nothing")):
            if trials.flaky:
                return f"flaky: {what} gives different results"
            for result in trials.results:
                if isinstance(result, str):
                    return f"{what}: {result}"
            if not trials.right:
                return f"{what} must score {trials.wanted:g}"
        raise AssertionError("an unsound task has a reason")


async def check_all(
    directories: Sequence[Path],
    backend: SandboxBackend,
    repeats: int,
    parallel: int,
    advance: Callable[[], None] = lambda: None,
) -> list[Report]:
    """Check every task directory, at most `parallel` sandboxes at a time. `advance` counts attempts."""
    slots = asyncio.Semaphore(parallel)

    async def attempt(task: Task, solve: bool) -> float | str:
        async with slots:
            try:
                return await _attempt(task, backend, solve)
            except Unsupported:
                raise
            except (GradingError, SandboxError, UserError) as error:
                return str(error)
            finally:
                advance()

    async def check(directory: Path) -> Report:
        try:
            task = load_task(directory)
        except UserError as error:
            return Report(directory.name, Trials(1.0, ()), Trials(0.0, ()), str(error))
        try:
            results = await asyncio.gather(*(attempt(task, solve) for solve in [True, False] * repeats))
        except Unsupported as error:
            return Report(task.id, Trials(1.0, ()), Trials(0.0, ()), str(error))
        return Report(task.id, Trials(1.0, tuple(results[0::2])), Trials(0.0, tuple(results[1::2])))

    return list(await asyncio.gather(*(check(directory) for directory in directories)))


async def _attempt(task: Task, backend: SandboxBackend, solve: bool) -> float | str:
    environment = TerminalEnvironment()
    sandbox = await backend.create(SandboxSpec.for_task(task, {"purpose": "check"}))
    try:
        await environment.setup(task, sandbox)
        if solve:
            done = await environment.solve(task, sandbox)
            if done.exit_code != 0:
                lines = (done.stderr or done.stdout).strip().splitlines()
                return f"solve.sh ended with status {done.exit_code}: {lines[-1] if lines else 'no output'}"
        await sandbox.kill_processes()
        return (await environment.grade(task, sandbox)).reward
    finally:
        await sandbox.destroy()
