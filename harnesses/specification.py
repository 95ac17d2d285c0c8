"""A harness program as data: one TOML file says how it is installed, started and understood."""

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from titogym.errors import UserError
from titogym.harnesses.base import Outcome

FOLDER = Path(__file__).parent / "programs"

Option = str | int | float | bool | tuple[str, ...]


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Install(_Data):
    """What the program needs. `pypi` goes into an environment of its own, `npm` into a prefix of its own.

    `imports` are the modules that it loads, so that they are compiled once and not at every start.
    """

    pypi: tuple[str, ...] = ()
    python: Annotated[str, Field(pattern=r"^3\.\d+$")] = "3.11"  # the least version
    imports: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    node: int | None = None  # the least major version
    system: tuple[str, ...] = ()  # programs that must be in the sandbox already


class Ending(_Data):
    """How the program tells its end: by a JSON file inside, where the dotted `key` holds one of `outcomes`.

    The file's text becomes the attempt's log. What is not listed ends as the exit status says.
    """

    file: str
    key: str
    outcomes: dict[str, tuple[Outcome, str]]


class Specification(_Data):
    """One harness program.

    command: its words; no shell runs. In each word, and in the values of `env` and `files`, placeholders
      are filled in: `{instruction}`, `{instruction_file}`, `{base_url}`, `{anthropic_base_url}`,
      `{api_key}`, `{model}`, `{workdir}`, `{logs}`, `{turns}`, `{python}`, `{node}`, `{prefix}`,
      `{driver}`, and every one of `options`. A word with an option that is a list is repeated per item.
    driver: a script beside this file that drives a library, for `{python} {driver}`.
    matcher: the tightest session matcher that holds it.
    policy: `branching` for a program with sub-agents, side requests or compaction.
    files: path inside the sandbox -> text, laid there before the program starts.
    mounts: host path -> path inside, read-only; a relative host path starts at this file.
    options: what a run may set (`-o KEY=VALUE`), with the defaults.
    ending: how its end is read, beside its exit status: 0 is a finished attempt, any other a crash.
    """

    title: str
    url: str = ""
    protocol: Literal["chat", "responses", "messages"]
    matcher: str = "call_id"
    policy: Literal["linear", "branching"] = "linear"
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    install: Install = Install()
    driver: str | None = None
    env: dict[str, str] = {}
    files: dict[str, str] = {}
    mounts: dict[str, str] = {}
    options: dict[str, Option] = {}
    ending: Ending | None = None
    notes: str = ""


def read(path: Path) -> Specification:
    """The harness in the file `path`. Raises `UserError` that names what is wrong with it."""
    try:
        return Specification.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"The harness file {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"The harness file {path} is no TOML: {error}.") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"The harness file {path} is wrong at {where}: {first['msg']}.") from error


def built_in() -> dict[str, Path]:
    """Name -> file of every program that comes along."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}
