"""Arguments of tool calls in a protocol that sends them as JSON objects.

A model may write anything as arguments; the clients of such a protocol accept nothing but an object, and
fail on the first character that cannot be part of one. They are told as much as is the beginning of one.
"""

import re
from typing import Any

import orjson
from partial_json_parser import Allow, loads

from titogym.gateway.sessions.matchers import canonical_arguments

_SPACE = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r"[-+.0-9a-zA-Z]+")
_WHOLE_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_TEXT = re.compile(
    r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))*"
)
_PART_OF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,4}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?")
_CLOSES = {"{": "}", "[": "]"}


class ObjectPrefix:
    """Lets through what continues the beginning of a JSON object, and nothing after what does not."""

    def __init__(self) -> None:
        self._held = ""  # may turn out to be right: a number or an escape that is not complete
        self._open: list[str] = []
        self._awaits = "object"  # object, key, first key, colon, value, first value, comma, nothing
        self._string: str | None = None  # inside a string: what is awaited after it
        self._broken = False

    def push(self, text: str) -> str:
        """As much of what arrived as may be told."""
        if self._broken:
            return ""
        text, self._held = self._held + text, ""
        at = 0
        while at < len(text):
            end = self._inside(text, at) if self._string else self._between(text, at)
            if self._broken or self._held:
                return text[:at] if end is None else text[:end]
            assert end is not None
            at = end
        return text

    def _inside(self, text: str, at: int) -> int:
        """Past the string, or as far as it goes."""
        found = _TEXT.match(text, at)
        assert found is not None
        assert self._string is not None
        at = found.end()
        if at == len(text):
            return at
        if text[at] == '"':
            self._awaits, self._string = self._string, None
            return at + 1
        part = _PART_OF_ESCAPE.match(text, at)
        if part is not None and part.end() == len(text):
            self._held = text[at:]
        else:
            self._broken = True
        return at

    def _between(self, text: str, at: int) -> int | None:
        space = _SPACE.match(text, at)
        assert space is not None
        if space.end() > at:
            return space.end()
        mark, awaits = text[at], self._awaits
        if mark == '"' and awaits in ("key", "first key"):
            self._string = "colon"
        elif mark == '"' and awaits in ("value", "first value"):
            self._string = "comma"
        elif mark in _CLOSES and (awaits in ("value", "first value") or (awaits == "object" and mark == "{")):
            self._open.append(_CLOSES[mark])
            self._awaits = "first key" if mark == "{" else "first value"
        elif awaits == "colon" and mark == ":":
            self._awaits = "value"
        elif awaits == "comma" and mark == ",":
            self._awaits = "key" if self._open[-1] == "}" else "value"
        elif self._open and mark == self._open[-1] and awaits in ("comma", "first key", "first value"):
            self._open.pop()
            self._awaits = "comma" if self._open else "nothing"
        elif awaits in ("value", "first value"):
            return self._scalar(text, at)
        else:
            self._broken = True
            return None
        return at + 1

    def _scalar(self, text: str, at: int) -> int | None:
        found = _SCALAR.match(text, at)
        if found is not None and found.end() == len(text):
            self._held = text[at:]
            return None
        if found is None or _WHOLE_SCALAR.fullmatch(found[0]) is None:
            self._broken = True
            return None
        self._awaits = "comma"
        return found.end()


def wire_value(arguments: str) -> dict[str, Any]:
    """The object that a client makes of the arguments as they were sampled; {} where they are none."""
    told = ObjectPrefix().push(arguments)
    try:
        value = orjson.loads(told)
    except orjson.JSONDecodeError:
        value = loads(told, Allow.ARR | Allow.OBJ) if told.strip() else {}
    return value if isinstance(value, dict) else {}


def same_value(sampled: str, sent: str) -> bool:
    """Whether a client that was told the sampled arguments sends their very value back."""
    return canonical_arguments(sent) == canonical_arguments(orjson.dumps(wire_value(sampled)).decode())
