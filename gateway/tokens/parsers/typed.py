"""Values of marked-up arguments, which are text, as JSON of the type that the tool declares."""

import json
from collections.abc import Sequence
from typing import Any, NoReturn

_NULLS = ("null", "None")
_BOOLEANS = {"true": "true", "false": "false", "True": "true", "False": "false"}


class ArgumentTypes:
    """The types that the tools of a request declare for their arguments."""

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self._schemas: dict[str, dict[str, Any]] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, dict) and isinstance(parameters := function.get("parameters"), dict):
                self._schemas[str(function.get("name"))] = parameters

    def of(self, tool: str, argument: str) -> frozenset[str]:
        """JSON type names; empty where nothing is declared."""
        schema = self._schemas.get(tool, {})
        properties = schema.get("properties")
        declared = properties.get(argument) if isinstance(properties, dict) else None
        return frozenset(_types(declared, schema, depth=0))


def _types(schema: Any, root: dict[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, dict) or depth > 8:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, dict) else None
        return _types(target, root, depth + 1)
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        types = {name for name in declared if isinstance(name, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            types.update(*(_types(item, root, depth + 1) for item in schema[key]))
    if not types:
        choices = (
            schema["enum"]
            if isinstance(schema.get("enum"), list)
            else [schema["const"]]
            if "const" in schema
            else []
        )
        types = {_type_of(choice) for choice in choices}
        if "properties" in schema:
            types.add("object")
        if "items" in schema:
            types.add("array")
    return types


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names: dict[type, str] = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def flows(types: frozenset[str]) -> bool:
    """Whether a value of these types is a string whatever its text, so that it can be passed on in pieces."""
    return "string" in types and "null" not in types


def to_json(text: str, types: frozenset[str]) -> str:
    """The value as JSON, spelt as it was sampled where that is JSON of its type; else a string."""
    plain = text.strip()
    if plain in _NULLS and ("null" in types or "string" not in types):
        return "null"
    if "string" in types:
        return json.dumps(text, ensure_ascii=False)
    if plain in _BOOLEANS and ("boolean" in types or not types):
        return _BOOLEANS[plain]
    try:
        json.loads(plain, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return plain


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
