"""Options by name: reading them from words, and fitting them to what a function or class takes."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from titogym.errors import UserError


def value(text: str) -> Any:
    """JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def pair(word: str) -> tuple[str, Any]:
    """Key and value of `KEY=VALUE`. Raises `UserError`."""
    key, equals, text = word.partition("=")
    if not equals or not key.isidentifier():
        raise UserError(f"The option {word!r} is not of the form KEY=VALUE.")
    return key, value(text)


def fitted(factory: Callable[..., Any], options: Mapping[str, Any], what: str) -> dict[str, Any]:
    """`options` as the annotated types of `factory` say.

    `what` names the thing in messages, such as "The harness 'command'". Raises `UserError` for options that
    it does not take, lacks, or whose values do not fit.
    """
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise UserError(
            f"{what} cannot be made with these options: {error}; "
            f"it takes {', '.join(signature.parameters) or 'none'}."
        ) from error
    annotated = factory if is_dataclass(factory) or not inspect.isclass(factory) else factory.__init__
    types: dict[str, Any] = get_type_hints(annotated, include_extras=True)
    typed = dict(options)
    for option in options.keys() & types.keys():
        adapter = TypeAdapter[Any](types[option], config=ConfigDict(arbitrary_types_allowed=True))
        try:
            typed[option] = adapter.validate_python(options[option])
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            raise UserError(f"{what} cannot be made with {option} = {options[option]!r}: {reason}.") from None
    return typed
