"""JSON schemas that an engine's grammar could never fulfil."""

from typing import Any

_DEEPEST = 64


def has_instance(schema: Any) -> bool:
    """Whether some finite JSON value may match: False for one that must hold itself, or nothing at all.

    A grammar of such a schema leaves the engine no token to sample. Only what makes a schema endless is
    looked at: references, and the parts of a value that must be there.
    """
    return _finite(schema, schema, frozenset(), 0)


def _finite(schema: Any, root: Any, within: frozenset[str], depth: int) -> bool:
    if schema is False:
        return False
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return True

    def finite(part: Any, inside: frozenset[str] = within) -> bool:
        return _finite(part, root, inside, depth + 1)

    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        if reference in within:
            return False
        target = _target(root, reference)
        if target is not None and not finite(target, within | {reference}):
            return False
    if schema.get("enum") == []:
        return False
    for key in ("anyOf", "oneOf"):
        choices = schema.get(key)
        if isinstance(choices, list) and not any(map(finite, choices)):
            return False
    every = schema.get("allOf")
    if isinstance(every, list) and not all(map(finite, every)):
        return False
    return all(map(finite, _needed(schema)))


def _needed(schema: dict[str, Any]) -> list[Any]:
    """The schemas of all parts that a value must have."""
    needed = []
    properties, required = schema.get("properties"), schema.get("required")
    if (
        isinstance(properties, dict)
        and isinstance(required, list)
        and schema.get("type", "object") == "object"
    ):
        needed += [properties[key] for key in required if isinstance(key, str) and key in properties]
    least = schema.get("minItems")
    if isinstance(least, int) and least > 0 and schema.get("type", "array") == "array":
        first = schema.get("prefixItems")
        first = first[:least] if isinstance(first, list) else []
        needed += first
        if len(first) < least:
            needed.append(schema.get("items"))
    return needed


def _target(root: Any, reference: str) -> Any:
    target = root
    for part in filter(None, reference[1:].split("/")):
        part = part.replace("~1", "/").replace("~0", "~")
        target = target.get(part) if isinstance(target, dict) else None
    return target
