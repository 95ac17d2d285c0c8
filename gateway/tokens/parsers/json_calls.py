"""Calls that are JSON objects with a name and arguments (`hermes_json`, `json_list`)."""

import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from titogym.gateway.tokens.parsers.blocks import ToolCallParser, readable
from titogym.gateway.tokens.parsers.events import CallArguments, Event
from titogym.gateway.tokens.parsers.scan import JsonFence
from titogym.templates.family import ToolCallFormat

_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)')
_LONGEST_HEADER = 8192


class _FencedParser(ToolCallParser):
    """Blocks of JSON: an end marker inside a string does not end them.

    Where the format has no end marker, a block lasts until the next begins.
    """

    def __init__(self, form: ToolCallFormat, tools: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(form, tools)
        self._fence = JsonFence(self._end or self._begin)

    def _enter(self) -> None:
        self._fence = JsonFence(self._end or self._begin)

    def _inside(self, text: str, events: list[Event]) -> str | None:
        inside, rest = self._fence.push(text)
        self._read(inside, events)
        if rest is None:
            return None
        self._close(events)
        self._in_block = False
        return rest if self._end else self._begin + rest

    def _cut(self, events: list[Event]) -> None:
        self._read(self._fence.flush(), events)
        self._close(events, cut=bool(self._end))

    def _whole(self, block: str, cut: bool, events: list[Event]) -> None:
        """Read a block that is complete: calls if it is JSON that names them, else content."""
        calls = None if cut else calls_in(block)
        if calls is None:
            self._content(self._opening + block + ("" if cut else self._end), events)
            return
        for name, arguments in calls:
            self._start(name, events)
            self._arguments(arguments, events)

    @abstractmethod
    def _read(self, text: str, events: list[Event]) -> None:
        """Take further text from inside the block."""

    @abstractmethod
    def _close(self, events: list[Event], *, cut: bool = False) -> None:
        """The end marker came, or (`cut`) the answer ended without it."""


class BlockParser(_FencedParser):
    """Blocks that are read whole: a JSON list of calls, or one call."""

    def __init__(self, form: ToolCallFormat, tools: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(form, tools)
        self._block: list[str] = []

    def _read(self, text: str, events: list[Event]) -> None:
        self._block.append(text)

    def _close(self, events: list[Event], *, cut: bool = False) -> None:
        block = "".join(self._block)
        self._block.clear()
        self._whole(block, cut, events)


class HermesParser(_FencedParser):
    """`{"name": ..., "arguments": ...}`, the arguments passed on while they are sampled.

    Once the name is known the call is committed: its arguments are all that stands before the closing
    brace, which is what a template would write around them again.
    """

    def __init__(self, form: ToolCallFormat, tools: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(form, tools)
        self._header = ""
        self._call: int | None = None
        self._tail = ""  # may be the call's closing brace
        self._pieces: list[str] = []

    def _read(self, text: str, events: list[Event]) -> None:
        if self._call is None:
            self._header += text
            if len(self._header) - len(text) > _LONGEST_HEADER:
                return
            found = _HEADER.match(self._header)
            name = _name(found[1]) if found else None
            if found is None or name is None:
                return
            self._call = self._start(name, events)
            text, self._header = self._header[found.end() :], ""
        text = self._tail + text
        body = text.rstrip()
        if body.endswith("}"):
            body = body[:-1].rstrip()
        self._tail = text[len(body) :]
        self._add(body, events)

    def _close(self, events: list[Event], *, cut: bool = False) -> None:
        if self._call is None:
            self._whole(self._header, cut, events)
        elif cut and not _is_json("".join(self._pieces)):
            self._add(self._tail, events)
        self._header, self._call, self._tail = "", None, ""
        self._pieces.clear()

    def _add(self, text: str, events: list[Event]) -> None:
        if text and self._call is not None:
            self._pieces.append(text)
            events.append(CallArguments(self._call, text))


def calls_in(block: str) -> list[tuple[str, str]] | None:
    """Names and arguments of the calls in a block of JSON; None where it is something else."""
    try:
        value = json.loads(block)
    except (ValueError, RecursionError):
        return None
    calls = [call_of(item) for item in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call is not None] if calls and None not in calls else None


def call_of(item: Any) -> tuple[str, str] | None:
    """Name and arguments of the call that a JSON value is; None where it is none."""
    name = readable(item.get("name")) if isinstance(item, dict) else None
    if name is None:
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return name, text.encode("utf-8", "replace").decode()  # an escape may have named half a surrogate pair


def _name(literal: str) -> str | None:
    try:
        return readable(json.loads(literal))
    except ValueError:
        return None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
