"""Finds environments and tasks by name: built in, from entry points, or by dotted path."""

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from titogym import dotted
from titogym.envs.environment import Environment
from titogym.envs.task import Task
from titogym.envs.terminal_bench import is_task_directory, load_task
from titogym.errors import UserError

ENVIRONMENTS = {"terminal": "titogym.envs.terminal:TerminalEnvironment"}
# A generator is called with (split, seed, count) and returns that many tasks.
GENERATORS = {"shell": "titogym.envs.shell_tasks:tasks"}
STARTER = Path(__file__).with_name("tasks")  # the task directories that come with titogym
ENVIRONMENT_GROUP = "titogym.environments"
GENERATOR_GROUP = "titogym.tasks"


def environments() -> dict[str, str]:
    """Name -> where it is defined."""
    return {**_installed(ENVIRONMENT_GROUP), **ENVIRONMENTS}


def generators() -> dict[str, str]:
    """Name -> where it is defined."""
    return {**_installed(GENERATOR_GROUP), **GENERATORS}


def environment(name: str) -> Environment:
    """The environment of this name, entry point or dotted path (`package.module:Class`)."""
    made: Environment = _find(name, environments(), "environment")()
    return made


def tasks(source: str, *, split: str = "train", seed: int = 0, count: int | None = None) -> list[Task]:
    """Tasks from a task directory, a directory of them, `starter`, or a generator's name.

    `split` and `seed` choose among a generator's tasks, of which there are `count` (100 if not said);
    of directories the first `count` are taken in the order of their names.
    """
    path = STARTER if source == "starter" else Path(source)
    if path.is_dir():
        return [load_task(directory) for directory in task_directories(path)[:count]]
    if source not in generators() and ":" not in source:
        raise UserError(
            f"There are no tasks at {source!r}: give a task directory, a directory of them, or one of "
            f"{', '.join(sorted(['starter', *generators()]))}."
        )
    generate: Callable[..., list[Task]] = _find(source, generators(), "task generator")
    return generate(split=split, seed=seed, count=100 if count is None else count)


def task_directories(path: Path) -> list[Path]:
    """`path` itself if it is a task directory, else those right below it. Raises `UserError` if none."""
    if is_task_directory(path):
        return [path]
    found = sorted(entry for entry in path.iterdir() if entry.is_dir() and is_task_directory(entry))
    if not found:
        raise UserError(f"Neither {path} nor a directory in it has a task.toml.")
    return found


def _find(name: str, known: Mapping[str, str], kind: str) -> Any:
    if name not in known and ":" not in name and "." not in name:
        raise UserError(
            f"There is no {kind} {name!r}: choose one of {', '.join(sorted(known))}, or a dotted path."
        )
    return dotted.load(known.get(name, name), kind)


def _installed(group: str) -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=group)}
