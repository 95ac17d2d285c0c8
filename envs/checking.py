"""Is a task sound? Its solution must score 1 and doing nothing must score 0, every time it is tried."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from titogym.envs.playing import Policy, play
from titogym.envs.sandboxes.base import SandboxBackend, SandboxError, Unsupported
from titogym.envs.task import GradingError, Task
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
    """`obstacles` are what kept attempts from being graded at all, in the same words as their results."""

    name: str
    solution: Trials
    nothing: Trials
    refused: str = ""
    obstacles: frozenset[str] = frozenset()

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


def obstacle(reports: Sequence[Report]) -> str | None:
    """What kept every task from being checked, None where the tasks themselves are to blame.

    The same for all: no sandbox can be made, say, a package is missing, or nothing has a reference. A task
    alone may be the one at fault, unless doing nothing meets the same.
    """
    met = frozenset[str]().union(*(report.obstacles for report in reports))
    if len(met) != 1 or any(report.refused for report in reports):
        return None
    (reason,) = met
    alone = len(reports) == 1
    results = [
        result
        for report in reports
        for result in (*report.solution.results, *(report.nothing.results if alone else ()))
    ]
    return reason if all(result == reason for result in results) else None


async def check_all(
    directories: Sequence[Path],
    backend: SandboxBackend,
    repeats: int,
    parallel: int,
    advance: Callable[[], None] = lambda: None,
) -> list[Report]:
    """Check every task directory, at most `parallel` attempts at a time. `advance` counts attempts."""
    found: list[Task | Report] = []
    for directory in directories:
        try:
            found.append(load_task(directory))
        except UserError as error:
            found.append(_refused(directory.name, error))
    tasks = [task for task in found if isinstance(task, Task)]
    reports = iter(await check_tasks(tasks, backend, repeats, parallel, advance))
    return [next(reports) if isinstance(task, Task) else task for task in found]


async def check_tasks(
    tasks: Sequence[Task],
    backend: SandboxBackend,
    repeats: int,
    parallel: int,
    advance: Callable[[], None] = lambda: None,
) -> list[Report]:
    """Check tasks of any environment: the solution of terminal ones, the `reference` of interactive ones."""
    slots = asyncio.Semaphore(parallel)

    async def attempt(task: Task, policy: Policy, obstacles: set[str]) -> float | str:
        async with slots:
            try:
                return (await play(task, policy, backend)).grade.reward
            except Unsupported:
                raise
            except GradingError as error:
                return str(error)
            except (SandboxError, UserError) as error:
                obstacles.add(str(error))
                return str(error)
            finally:
                advance()

    async def check(task: Task) -> Report:
        policies: list[Policy] = ["reference", "nothing"]
        met: set[str] = set()
        try:
            results = await asyncio.gather(*(attempt(task, policy, met) for policy in policies * repeats))
        except Unsupported as error:
            return _refused(task.id, error)
        solution, nothing = Trials(1.0, tuple(results[0::2])), Trials(0.0, tuple(results[1::2]))
        return Report(task.id, solution, nothing, obstacles=frozenset(met))

    return list(await asyncio.gather(*(check(task) for task in tasks)))


def _refused(name: str, error: Exception) -> Report:
    return Report(name, Trials(1.0, ()), Trials(0.0, ()), str(error))
