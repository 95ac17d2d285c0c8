"""Finding a harness: built in, an entry point of group `titogym.harnesses`, a dotted path, or a TOML file."""

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from titogym.dotted import load
from titogym.errors import UserError
from titogym.harnesses.agent_program import load as load_program
from titogym.harnesses.base import Harness
from titogym.harnesses.specification import built_in
from titogym.options import fitted

GROUP = "titogym.harnesses"
BUILT_IN = {
    "openai_loop": "titogym.harnesses.openai_loop:OpenAILoop",
    "command": "titogym.harnesses.command:Command",
}


def names() -> list[str]:
    """Every harness that can be named without a dotted path."""
    return sorted({*BUILT_IN, *built_in(), *(point.name for point in entry_points(group=GROUP))})


def harness(name: str, **options: Any) -> Harness:
    """Make the harness `name` with its `options`. Raises `UserError` for what it does not know or take."""
    if name in (programs := built_in()):
        return load_program(name, programs[name], **options)
    if name.endswith(".toml"):
        return load_program(Path(name).stem, Path(name), **options)
    factory = _factory(name)
    return factory(**fitted(factory, options, f"The harness {name!r}"))


def _factory(name: str) -> Callable[..., Harness]:
    if name in BUILT_IN:
        return _callable(BUILT_IN[name])
    for point in entry_points(group=GROUP, name=name):
        return _callable(point.value)
    if "." in name or ":" in name:
        return _callable(name)
    raise UserError(
        f"There is no harness {name!r}: choose {', '.join(names())}, or give a dotted path or a TOML file."
    )


def _callable(path: str) -> Callable[..., Harness]:
    found: Callable[..., Harness] = load(path, "harness")
    return found
