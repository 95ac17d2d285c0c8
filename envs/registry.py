"""Finds environments and tasks by name: built in, from entry points, or by dotted path.

Where tasks are asked for (`titogym run`, `titogym eval`, `environment.source` of a training run), a source
is one of

    path/to/task            a task directory
    path/to/tasks           a directory of them
    starter                 those that come with titogym
    questions.jsonl         a file of questions, one a line
    arithmetic              a task generator, by its name
    my_package.tasks:make   or by its dotted path

and all of them take options as the query of a URL does: `arithmetic?level=2&split=test&seed=7`. `split`,
`seed` and `count` say which tasks; the rest are the generator's own.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from titogym import dotted, options
from titogym.envs.environment import Environment
from titogym.envs.task import Task
from titogym.envs.terminal_bench import is_task_directory, load_task
from titogym.errors import UserError

ENVIRONMENTS = {
    "terminal": "titogym.envs.terminal:TerminalEnvironment",
    "arithmetic": "titogym.envs.arithmetic:Arithmetic",
    "guess": "titogym.envs.guessing:Guessing",
    "sql": "titogym.envs.text_to_sql:TextToSql",
    "question": "titogym.envs.single_turn:Question",
    "code_question": "titogym.envs.single_turn:CodeQuestion",
    "gymnasium": "titogym.envs.gymnasium_text:GymnasiumText",
    "openenv": "titogym.envs.openenv.client:OpenEnv",
}
# A generator is called with (split, seed, count, **options) and returns that many tasks.
GENERATORS = {
    "shell": "titogym.envs.shell_tasks:tasks",
    "arithmetic": "titogym.envs.arithmetic:tasks",
    "guess": "titogym.envs.guessing:tasks",
    "sql": "titogym.envs.text_to_sql:tasks",
    "edit": "titogym.envs.edit_tasks:tasks",
    "jsonl": "titogym.envs.jsonl_tasks:tasks",
    "gymnasium": "titogym.envs.gymnasium_text:tasks",
    "openenv": "titogym.envs.openenv.client:tasks",
}
STARTER = Path(__file__).with_name("tasks")  # the task directories that come with titogym
ENVIRONMENT_GROUP = "titogym.environments"
GENERATOR_GROUP = "titogym.tasks"
DEFAULT_COUNT = 100  # tasks of a generator that does not say itself


@dataclass(frozen=True, slots=True)
class Source:
    """Where tasks come from: `name` is a path, a generator's name or a dotted path."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "Source":
        """Split `name?key=value&key=value`. Raises `UserError`."""
        with suppress(OSError):  # too long for a path
            if Path(text).exists():
                return cls(text)
        name, _, query = text.partition("?")
        pairs = [options.pair(unquote(word)) for word in query.split("&") if word]
        keys = [key for key, _ in pairs]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise UserError(f"The source {text!r} gives {twice[0]!r} twice.")
        return cls(name, dict(pairs))


def environments() -> dict[str, str]:
    """Name -> where it is defined."""
    return {**_installed(ENVIRONMENT_GROUP), **ENVIRONMENTS}


def generators() -> dict[str, str]:
    """Name -> where it is defined."""
    return {**_installed(GENERATOR_GROUP), **GENERATORS}


def environment(name: str) -> Environment:
    """A new environment of this name, entry point or dotted path (`package.module:Class`)."""
    kind = _find(name, environments(), "environment")
    try:
        made: Environment = kind()
    except (Exception, SystemExit) as error:  # a user's own code
        raise UserError(
            f"The environment {name!r} cannot be made: {type(error).__name__}: {error}."
        ) from error
    for attribute in ("name", "interactive", "needs_sandbox", "reset", "grade", "close"):
        if not hasattr(made, attribute):
            raise UserError(
                f"The environment {name!r} has no `{attribute}`: see the protocol titogym.envs.environment."
            )
    driver = "step" if made.interactive else "run"
    if not hasattr(made, driver):
        raise UserError(
            f"The environment {name!r} says interactive = {made.interactive}, but has no `{driver}`."
        )
    return made


def generator(name: str) -> Callable[..., list[Task]]:
    """The task generator of this name, entry point or dotted path."""
    found: Callable[..., list[Task]] = _find(name, generators(), "task generator")
    return found


def tasks(source: str, *, split: str = "train", seed: int = 0, count: int | None = None) -> list[Task]:
    """The tasks of a source; the options that stand in it win over `split`, `seed` and `count`.

    `split` and `seed` choose among a generator's tasks, of which there are `count` (mostly 100 if not
    said); of directories and files the first `count` are taken in their order. Raises `UserError`, for two
    of one name too.
    """
    found = _tasks(source, split, seed, count)
    names = Counter(task.id for task in found)
    if twice := [name for name, times in names.items() if times > 1]:
        raise UserError(f"Two tasks of {source} are called {twice[0]!r}: give each a name of its own.")
    return found


def _tasks(source: str, split: str, seed: int, count: int | None) -> list[Task]:
    parsed = Source.parse(source)
    given = {"split": split, "seed": seed, "count": count, **parsed.options}
    if isinstance(given["count"], int) and given["count"] < 1:
        raise UserError(f"The source {source!r} is asked for {given['count']} tasks: ask for at least one.")
    path = directory(parsed.name)
    if path is not None:
        extra = parsed.options.keys() - {"count"}
        if extra and task_directories(path):
            raise UserError(f"Task directories take no option {min(extra)!r}, only count.")
        checked = options.fitted(_of_directories, {"path": path, "count": given["count"]}, f"{parsed.name}")
        return _of_directories(**checked)
    file = Path(parsed.name)
    if file.suffix == ".jsonl" and file.is_file():
        name, given = "jsonl", {"path": file, **given}
    else:
        name = parsed.name
    if name not in generators() and ":" not in name:
        raise UserError(
            f"There are no tasks at {name!r}: give a task directory, a directory of them, a .jsonl file, or "
            f"one of {', '.join(sorted(['starter', *generators()]))}."
        )
    return _generated(name, given)


def directory(name: str) -> Path | None:
    """Where the task directories that a source names are, None where it names something else.

    A generator's own package often lies in a folder of its name: a folder without tasks hides no generator.
    """
    if name == "starter":
        return STARTER
    path = Path(name)
    if not path.is_dir() or (name in generators() and not _inside(path)):
        return None
    return path


def task_directories(path: Path) -> list[Path]:
    """`path` itself if it is a task directory, else those right below it. Raises `UserError` if none."""
    found = _inside(path)
    if not found and (path / "__init__.py").is_file():
        raise UserError(
            f"{path} is a package, no folder of tasks: name its task generator by its dotted path, such as "
            f"{path.name}.tasks:tasks, or install it (pip install -e .) and use the name that it registers."
        )
    if not found:
        raise UserError(f"Neither {path} nor a directory in it has a task.toml.")
    return found


def _inside(path: Path) -> list[Path]:
    if is_task_directory(path):
        return [path]
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and is_task_directory(entry))


def _of_directories(path: Path, count: int | None) -> list[Task]:
    return [load_task(directory) for directory in task_directories(path)[:count]]


def _generated(name: str, given: dict[str, Any]) -> list[Task]:
    generate = generator(name)
    if given["count"] is None:
        del given["count"]
        count = inspect.signature(generate).parameters.get("count")
        if count is not None and count.default is count.empty:
            given["count"] = DEFAULT_COUNT
    fitted = options.fitted(generate, given, f"The task generator {name!r}")
    try:
        made = generate(**fitted)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a user's own code
        raise UserError(f"The task generator {name!r} failed: {type(error).__name__}: {error}.") from error
    if not isinstance(made, list) or not all(isinstance(task, Task) for task in made):
        raise UserError(f"The task generator {name!r} must return a list of tasks, not {str(made)[:80]!r}.")
    if not made:
        raise UserError(f"The task generator {name!r} made no task of {given}.")
    return made


def _find(name: str, known: Mapping[str, str], kind: str) -> Any:
    if name not in known and ":" not in name and "." not in name:
        raise UserError(
            f"There is no {kind} {name!r}: choose one of {', '.join(sorted(known))}, or a dotted path."
        )
    return dotted.load(known.get(name, name), kind)


def _installed(group: str) -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=group)}
