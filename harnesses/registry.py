"""Finding a harness by name: built in, an entry point of group `titogym.harnesses`, or a dotted path."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from importlib.metadata import entry_points
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from titogym.dotted import load
from titogym.errors import UserError
from titogym.harnesses.base import Harness

GROUP = "titogym.harnesses"
BUILT_IN = {
    "openai_loop": "titogym.harnesses.openai_loop:OpenAILoop",
    "command": "titogym.harnesses.command:Command",
    "mini_swe_agent": "titogym.harnesses.mini_swe_agent:MiniSweAgent",
}


def names() -> list[str]:
    """Every harness that can be named without a dotted path."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def harness(name: str, **options: Any) -> Harness:
    """Make the harness `name` with its `options`. Raises `UserError` for what it does not know or take."""
    factory = _factory(name)
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise UserError(
            f"The harness {name!r} cannot be made with these options: {error}; "
            f"it takes {', '.join(inspect.signature(factory).parameters) or 'none'}."
        ) from error
    return factory(**_typed(name, factory, options))


def _factory(name: str) -> Callable[..., Harness]:
    if name in BUILT_IN:
        return _callable(BUILT_IN[name])
    for point in entry_points(group=GROUP, name=name):
        return _callable(point.value)
    if "." in name or ":" in name:
        return _callable(name)
    raise UserError(f"There is no harness {name!r}: choose {', '.join(names())}, or give a dotted path.")


def _typed(name: str, factory: Callable[..., Harness], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the fields of a dataclass say; as they are for a factory of another kind."""
    types: dict[str, Any] = get_type_hints(factory, include_extras=True) if is_dataclass(factory) else {}
    typed = dict(options)
    for option in options.keys() & types.keys():
        adapter = TypeAdapter[Any](types[option], config=ConfigDict(arbitrary_types_allowed=True))
        try:
            typed[option] = adapter.validate_python(options[option])
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            raise UserError(
                f"The harness {name!r} cannot be made with {option} = {options[option]!r}: {reason}."
            ) from None
    return typed


def _callable(path: str) -> Callable[..., Harness]:
    found: Callable[..., Harness] = load(path, "harness")
    return found
