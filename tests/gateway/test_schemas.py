"""Schemas that nothing can match are known before an engine is asked for them."""

import time
from typing import Any

import pytest

from titogym.gateway.protocols.schemas import has_instance

ITSELF = {"$ref": "#"}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": ITSELF}},
    "required": ["value", "children"],
}


@pytest.mark.parametrize(
    ("schema", "possible"),
    [
        (ITSELF, False),
        ({"allOf": [ITSELF]}, False),
        ({"anyOf": [ITSELF, {"type": "integer"}]}, True),
        ({"type": "object", "properties": {"a": ITSELF}, "required": ["a"]}, False),
        ({"type": "object", "properties": {"a": ITSELF}}, True),
        ({"type": "array", "items": ITSELF, "minItems": 1}, False),
        ({"type": "array", "items": ITSELF}, True),
        ({"type": "array", "prefixItems": [{}, ITSELF], "minItems": 2}, False),
        (TREE, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "null"}}}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}}, True),
        ({"$ref": "#/nowhere"}, True),  # the engine says so
        ({"enum": []}, False),
        ({}, True),
        (True, True),
        (False, False),
        ({"required": 3, "properties": [], "minItems": "x", "anyOf": {}, "$ref": 3}, True),
    ],
)
def test_whether_anything_can_match(schema: Any, possible: bool) -> None:
    assert has_instance(schema) is possible


def test_references_that_double_at_each_level_take_no_time() -> None:
    below = [{"$ref": f"#/$defs/{n + 1}"} for n in range(60)]
    levels = {str(n): {"allOf": [ref, ref]} for n, ref in enumerate(below)}
    schema = {"$ref": "#/$defs/0", "$defs": {**levels, "60": {"type": "null"}}}
    started = time.monotonic()
    assert has_instance(schema)
    assert time.monotonic() - started < 1
