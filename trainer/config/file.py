"""The configuration as people write it: one TOML file with overrides, and what is wrong with it by line."""

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titogym.errors import UserError
from titogym.trainer.config.sections import RunConfig, Section


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in the TOML file `path`, with `dotted.key=value` overrides applied on top.

    Relative paths in it are relative to the working directory. Raises `UserError` listing everything
    that is wrong, with line numbers.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot read the configuration {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"The configuration {path} is not UTF-8 text: save it as UTF-8") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"The configuration {path} is not valid TOML: {error}") from None
    places = {key: f"line {number}" for key, number in _key_lines(text).items()}
    for override in overrides:
        places[_override(data, override)] = f"--set {override}"
    return parse_config(data, origin=str(path), places=places)


def parse_config(
    data: Mapping[str, Any], *, origin: str = "configuration", places: Mapping[str, str] | None = None
) -> RunConfig:
    """The configuration in nested tables `data`. Raises `UserError` listing everything that is wrong.

    `places` say where a key was given: in which line of `origin`, or by which `--set`.
    """
    places = places or {}
    try:
        return RunConfig.model_validate(dict(data))
    except ValidationError as error:
        problems = [line for detail in error.errors() for line in _explain(detail, places)]
        if len(problems) == 1:
            of_file = not places.get(_key(error.errors()[0]), "").startswith("--set")
            raise UserError(f"{origin}: {problems[0]}" if of_file else problems[0]) from None
        listing = "\n".join(f"  - {problem}" for problem in problems)
        raise UserError(f"{origin} has {len(problems)} problems:\n{listing}") from None


def sections() -> dict[str, type[Section]]:
    """The tables of the file, in order, with their models."""
    return {name: _section_model(field.annotation) for name, field in RunConfig.model_fields.items()}


def _section_model(annotation: Any) -> type[Section]:
    """The model of a section field, which may be optional."""
    candidates = getattr(annotation, "__args__", (annotation,))
    return next(c for c in candidates if isinstance(c, type) and issubclass(c, Section))


def _key(detail: Any) -> str:
    return ".".join(str(part) for part in detail["loc"])


def _explain(detail: Any, places: Mapping[str, str]) -> list[str]:
    """One pydantic error as sentences for the person who wrote the file."""
    key = _key(detail)
    where = f" ({places[key]})" if key in places else ""
    kind, value = detail["type"], detail["input"]
    if not key:  # an impossible combination, in our own words
        return str(detail["ctx"]["error"]).splitlines()
    if kind == "extra_forbidden":
        return [f"unknown key {key}{where}: {_suggest(key)}"]
    if kind == "missing":
        table = sections().get(key)
        what = f"add the table [{key}]" if table else f"add it; {_description(key)}"
        return [f"{key} is missing: {what}"]
    if kind in ("model_type", "model_attributes_type"):
        return [f"{key}{where} must be a table: write [{key}]"]
    reason = detail["msg"].replace("Input should be", "must be").replace("Value should have", "must have")
    reason = reason[0].lower() + reason[1:]
    return [f"{key}{where} {reason}, not {_toml(value)}"]


def _suggest(key: str) -> str:
    """The key that was meant: a near miss in its table, else in another; failing that, the choices."""
    table, _, name = key.partition(".")
    tables = {known: list(model.model_fields) for known, model in sections().items()}
    if not name:
        near = difflib.get_close_matches(table, tables, n=1)
        return f"did you mean {near[0]}?" if near else f"remove it; the tables are {', '.join(tables)}"
    own = tables.get(table, [])
    if near := difflib.get_close_matches(name, own, n=1, cutoff=0.7):
        return f"did you mean {table}.{near[0]}?"
    for other, names in tables.items():
        if near := difflib.get_close_matches(name, names, n=1, cutoff=0.85):
            return f"did you mean {other}.{near[0]}?"
    return f"remove it; [{table}] has {', '.join(own)}"


def _description(key: str) -> str:
    table, _, name = key.partition(".")
    field = sections()[table].model_fields[name] if table in sections() else None
    return (field.description or "") if field else ""


def _toml(value: Any) -> str:
    """`value` as it would look in the file."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


_TABLE = re.compile(r"^\s*\[\s*([A-Za-z0-9_.\- ]+?)\s*\]\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_.\-]+)\s*=")


def _key_lines(text: str) -> dict[str, int]:
    """Line number (from 1) of each table and bare key. Good enough for messages; quoted keys are left out."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _TABLE.match(line):
            table = match[1].replace(" ", "")
            lines.setdefault(table, number)
        elif match := _KEY.match(line):
            lines.setdefault(f"{table}.{match[1]}" if table else match[1], number)
    return lines


def _override(data: dict[str, Any], override: str) -> str:
    """Set one `dotted.key=value`; the value is TOML, and text that is not TOML is a string. Gives the key."""
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or len(parts) < 2 or not all(parts):
        raise UserError(
            f"--set {override}: write it as section.key=value, for example rollout.temperature=0.7"
        )
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    table = data
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {override}: {part} is not a table")
    table[parts[-1]] = value
    return ".".join(parts)
