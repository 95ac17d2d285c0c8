"""JSON schemas that an engine's grammar could never fulfil."""

from collections.abc import Iterator
from typing import Any

_MOST_REFERENCES = 200  # of a schema that is looked at: more would take too long


def has_instance(schema: Any) -> bool:
    """Whether some finite JSON value may match: False for one that must hold itself, or nothing at all.

    A grammar of such a schema leaves the engine no token to sample. Only what makes a schema endless is
    looked at: references, and the parts of a value that must be there.
    """
    targets = {reference: _target(schema, reference) for reference in set(_references(schema))}
    if len(targets) > _MOST_REFERENCES:
        return True
    finite: set[str] = set()  # references whose target may be matched, as far as is known
    while True:
        found = {
            reference
            for reference, target in targets.items()
            if reference not in finite and (target is None or _finite(target, finite))
        }
        if not found:
            return _finite(schema, finite)
        finite |= found


def _references(schema: Any) -> Iterator[str]:
    """The references within the schema, to places in itself."""
    for part in schema if isinstance(schema, list) else schema.values() if isinstance(schema, dict) else ():
        yield from _references(part)
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if isinstance(reference, str) and reference.startswith("#"):
        yield reference


def _finite(schema: Any, known: set[str]) -> bool:
    if schema is False:
        return False
    if not isinstance(schema, dict):
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#") and reference not in known:
        return False
    if schema.get("enum") == []:
        return False
    for key in ("anyOf", "oneOf"):
        choices = schema.get(key)
        if isinstance(choices, list) and not any(_finite(choice, known) for choice in choices):
            return False
    every = schema.get("allOf")
    needed = [*(every if isinstance(every, list) else []), *_needed(schema)]
    return all(_finite(part, known) for part in needed)


def _needed(schema: dict[str, Any]) -> list[Any]:
    """The schemas of all parts that a value must have."""
    needed: list[Any] = []
    properties, required = schema.get("properties"), schema.get("required")
    if _may_be("object", schema) and isinstance(properties, dict) and isinstance(required, list):
        needed += [properties[key] for key in required if isinstance(key, str) and key in properties]
    least = schema.get("minItems")
    if _may_be("array", schema) and isinstance(least, int) and least > 0:
        first = schema.get("prefixItems")
        first = first[:least] if isinstance(first, list) else []
        needed += first
        if len(first) < least:
            needed.append(schema.get("items"))
    return needed


def _may_be(kind: str, schema: dict[str, Any]) -> bool:
    """Whether the schema is for values of this kind, as far as it says anything of kinds."""
    return bool(schema.get("type", kind) == kind)


def _target(root: Any, reference: str) -> Any:
    target = root
    for part in filter(None, reference[1:].split("/")):
        part = part.replace("~1", "/").replace("~0", "~")
        target = target.get(part) if isinstance(target, dict) else None
    return target
