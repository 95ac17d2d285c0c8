"""The one runner of harness programs: installs what a specification names, and runs it in the sandbox.

The program itself is unmodified. Its installation is seen read-only inside, at the same path as outside.
"""

import asyncio
import json
import logging
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from titogym import npm, venvs
from titogym.envs.sandboxes.base import SYSTEM_PATH, Mount, Sandbox, SandboxError
from titogym.envs.task import Task
from titogym.errors import UserError
from titogym.harnesses.base import Connection, HarnessResult
from titogym.harnesses.command import fill
from titogym.harnesses.program import (
    INSTRUCTION_FILE,
    LOG_DIRECTORY,
    read_tail,
    run_program,
)
from titogym.harnesses.specification import Ending, Install, Option, Specification, read

log = logging.getLogger(__name__)

DRIVER_FILE = "/run/titogym/driver.py"
_ENDING_BYTES = 16 << 20
_COMMON: dict[str, Option] = {"args": (), "matcher": "", "policy": "", "packages": ()}


@dataclass(frozen=True, slots=True)
class Installed:
    """Where the program is. `values` fill placeholders."""

    values: Mapping[str, str]
    mounts: tuple[Mount, ...]


class AgentProgram:
    """The harness program `specification`, which was read from a file in `folder`.

    Beside the options that it declares, every program takes `args` (further words at the end of its
    command), `matcher`, `policy`, and `packages` (what to install in place of the versions that were tried).
    """

    inside = True

    def __init__(self, name: str, specification: Specification, folder: Path, **options: Any) -> None:
        self.name = name
        self.specification = specification
        self._folder = folder
        self._options = _typed(name, {**specification.options, **_COMMON}, options)
        self.matcher = str(self._options["matcher"] or specification.matcher)
        self.policy = str(self._options["policy"] or specification.policy)
        self._mounts = tuple(
            Mount(_existing(name, folder / source), target) for source, target in specification.mounts.items()
        )
        self._driver = (
            _existing(name, folder / specification.driver).read_text(encoding="utf-8")
            if specification.driver
            else None
        )
        self._installed: Installed | None = None

    def options(self) -> tuple[str, ...]:
        """The names of what a run may set."""
        return tuple(self._options)

    async def prepare(self) -> None:
        if self._installed is None:
            packages = self._options["packages"]
            assert isinstance(packages, tuple)
            self._installed = await asyncio.to_thread(
                install, self.name, self.specification.install, packages
            )

    def mounts(self) -> tuple[Mount, ...]:
        return (*self._mounts, *(self._installed.mounts if self._installed else ()))

    async def run(self, task: Task, sandbox: Sandbox, connection: Connection) -> HarnessResult:
        values = self._values(task, connection)
        files = {path: fill(text, values) for path, text in self.specification.files.items()}
        if self._driver is not None:
            files[DRIVER_FILE] = self._driver
        try:
            for path, text in files.items():
                folder, _, name = path.rpartition("/")
                await sandbox.upload({name: text}, folder or "/")
        except SandboxError as error:
            return HarnessResult("crashed", f"The sandbox failed the agent: {error}")
        result = await run_program(
            self._command(values),
            name=self.name,
            task=task,
            sandbox=sandbox,
            connection=connection,
            env={name: fill(text, values) for name, text in self.specification.env.items()},
        )
        if self.specification.ending is None:
            return result
        try:
            told = await read_tail(sandbox, self.specification.ending.file, _ENDING_BYTES)
        except SandboxError:
            return result
        return _read_ending(result, told, self.specification.ending)

    async def close(self) -> None:
        pass

    def _values(self, task: Task, connection: Connection) -> dict[str, str]:
        values = {
            "instruction": task.instruction,
            "instruction_file": INSTRUCTION_FILE,
            "base_url": connection.base_url,
            "anthropic_base_url": connection.anthropic_base_url,
            "api_key": connection.api_key,
            "model": connection.model,
            "workdir": task.workdir,
            "logs": LOG_DIRECTORY,
            "turns": str(task.limits.turns),
            "path": SYSTEM_PATH,
            "driver": DRIVER_FILE,
            "python": "python3",  # the sandbox's, where nothing was installed
            **(self._installed.values if self._installed else {}),
            **{name: _text(value) for name, value in self._options.items() if not isinstance(value, tuple)},
        }
        return {f"{{{name}}}": value for name, value in values.items()}

    def _command(self, values: Mapping[str, str]) -> list[str]:
        lists = {name: value for name, value in self._options.items() if isinstance(value, tuple)}
        words = [*self.specification.command, "{args}"]
        return [fill(one, values) for word in words for one in _repeated(word, lists, values)]


def load(name: str, path: Path, **options: Any) -> AgentProgram:
    """The program that the TOML file `path` describes. Raises `UserError` for what is wrong with it."""
    return AgentProgram(name, read(path), path.parent, **options)


def install(name: str, wanted: Install, packages: Sequence[str] = ()) -> Installed:
    """Install a program where it is not yet. Raises `UserError` that says what is missing or failed."""
    missing = [program for program in wanted.system if shutil.which(program, path=SYSTEM_PATH) is None]
    if missing:
        raise UserError(f"The harness {name!r} needs {' and '.join(missing)}: install it on this machine.")
    values: dict[str, str] = {}
    seen: set[Path] = set()
    if wanted.pypi:
        python = venvs.find_python(wanted.python)
        if python is None:
            raise UserError(
                f"The harness {name!r} needs Python {wanted.python} or newer, and there is none here: "
                f"install python{wanted.python}."
            )
        interpreter = venvs.ensure(
            name.replace("_", "-"),
            [packages or wanted.pypi],
            python=python,
            uv=True,
            imports=wanted.imports,
            report=log.info,
        )
        values["python"] = str(interpreter)
        seen |= _needed(interpreter)
    if wanted.npm:
        prefix, node = npm.ensure(
            name.replace("_", "-"), packages or wanted.npm, node=wanted.node, report=log.info
        )
        values |= {"prefix": str(prefix), "node": str(node)}
        seen |= {path for path in (prefix, node) if not path.is_relative_to("/usr")}
    outer = [path for path in seen if not any(path != other and path.is_relative_to(other) for other in seen)]
    return Installed(values, tuple(Mount(path, str(path)) for path in sorted(outer)))


def _needed(python: Path) -> set[Path]:
    """The directories without which this interpreter does not run; `/usr` every sandbox has."""
    script = "import sys; print(sys.prefix); print(sys.base_prefix)"
    found = subprocess.run([str(python), "-c", script], check=True, capture_output=True, text=True).stdout
    return {path for path in map(Path, found.split()) if not path.is_relative_to("/usr")}


def _typed(name: str, known: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Option]:
    """The options of a run: the defaults, and what was given in their place, each of its default's type."""
    unknown = given.keys() - known.keys()
    if unknown:
        raise UserError(
            f"The harness {name!r} cannot be made with the option {', '.join(sorted(unknown))}; "
            f"it takes {', '.join(known)}."
        )
    typed = dict(known)
    for option, value in given.items():
        kind: Any = tuple[str, ...] if isinstance(known[option], tuple) else type(known[option])
        try:
            typed[option] = TypeAdapter[Any](kind).validate_python(value)
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            raise UserError(
                f"The harness {name!r} cannot be made with {option} = {value!r}: {reason}."
            ) from None
    return typed


def _existing(name: str, path: Path) -> Path:
    if not path.exists():
        raise UserError(f"The harness {name!r} needs {path}, which does not exist.")
    return path.resolve()


def _repeated(word: str, lists: Mapping[str, tuple[str, ...]], values: Mapping[str, str]) -> Iterator[str]:
    name = next((name for name in lists if f"{{{name}}}" in word), None)
    if name is None:
        yield word
        return
    for item in lists[name]:
        yield word.replace(f"{{{name}}}", item)


def _text(value: Option) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read_ending(result: HarnessResult, text: str, ending: Ending) -> HarnessResult:
    """`result` as the program's own file tells it, where it says more."""
    try:
        told = json.loads(text)
        for part in ending.key.split("."):
            told = told[part]
    except (ValueError, TypeError, LookupError):
        return result
    result = replace(result, log=text, metadata={"exit_status": told})
    if result.outcome == "finished" and isinstance(told, str) and told in ending.outcomes:
        outcome, detail = ending.outcomes[told]
        return replace(result, outcome=outcome, detail=detail)
    return result
