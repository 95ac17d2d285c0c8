"""Finding tool calls in an answer's text, for the formats that families declare.

A block whose call has a readable name is a call, its arguments given as they were sampled, valid JSON
or not: the harness answers a bad call better than we can. Any other block is content, word for word.
"""

import json
import re
import secrets
from abc import ABC, abstractmethod
from typing import Any

from titogym.gateway.tokens.parsers.events import CallArguments, CallStart, Content, Event
from titogym.gateway.tokens.parsers.scan import JsonFence, overlap
from titogym.templates.family import ToolCallFormat

_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)')
_LONGEST_HEADER = 8192


def new_call_id() -> str:
    """An id of our own: unguessable, so that its echo proves which call is meant."""
    return "call_" + secrets.token_hex(12)


class ToolCallParser(ABC):
    """Splits content from blocks between the format's markers; a subclass reads one block.

    The newline that templates write ahead of a block belongs to the block, and white space between
    two blocks to neither.
    """

    def __init__(self, form: ToolCallFormat) -> None:
        self._begin = form.begin.strip()
        self._end = form.end.strip()
        self._buffer = ""  # outside a block: text that may belong to the next marker
        self._fence: JsonFence | None = None  # inside a block
        self._opening = ""  # what opened the block, to give back if it is no call
        self._calls = 0

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        rest: str | None = text
        while rest is not None:
            rest = self._outside(rest, events) if self._fence is None else self._inside(rest, events)
        return events

    def flush(self) -> list[Event]:
        events: list[Event] = []
        if self._fence is not None:
            self._read(self._fence.flush(), events)
            self._cut(events)
            self._fence = None
        if not (self._calls and self._buffer.isspace()):
            self._content(self._buffer, events)
        self._buffer = ""
        return events

    def _outside(self, text: str, events: list[Event]) -> str | None:
        text, self._buffer = self._buffer + text, ""
        at = text.find(self._begin)
        if at >= 0:
            before = text[:at].removesuffix("\n")
            self._opening = text[len(before) : at + len(self._begin)]
            if self._calls and (not before or before.isspace()):
                self._opening = before + self._opening
            else:
                self._content(before, events)
            self._fence = JsonFence(self._end)
            return text[at + len(self._begin) :]
        keep = len(text) - max(overlap(text, "\n" + self._begin), overlap(text, self._begin))
        if self._calls and text[:keep].isspace():
            keep = 0
        self._content(text[:keep], events)
        self._buffer = text[keep:]
        return None

    def _inside(self, text: str, events: list[Event]) -> str | None:
        assert self._fence is not None
        inside, rest = self._fence.push(text)
        self._read(inside, events)
        if rest is not None:
            self._close(events)
            self._fence = None
        return rest

    def _content(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(Content(text))

    def _start(self, name: str, events: list[Event]) -> int:
        index = self._calls
        self._calls += 1
        events.append(CallStart(index, new_call_id(), name))
        return index

    def _whole(self, block: str, ended: bool, events: list[Event]) -> None:
        """Read a block that is complete: calls if it is JSON that names them, else content."""
        calls = _calls(block) if ended else None
        if calls is None:
            self._content(self._opening + block + (self._end if ended else ""), events)
            return
        for name, arguments in calls:
            index = self._start(name, events)
            events.append(CallArguments(index, arguments))

    @abstractmethod
    def _read(self, text: str, events: list[Event]) -> None:
        """Take further text from inside the block."""

    @abstractmethod
    def _close(self, events: list[Event]) -> None:
        """The end marker came."""

    @abstractmethod
    def _cut(self, events: list[Event]) -> None:
        """The answer ended inside the block."""


class BlockParser(ToolCallParser):
    """Blocks that are read whole: a JSON list of calls, or one call."""

    def __init__(self, form: ToolCallFormat) -> None:
        super().__init__(form)
        self._block: list[str] = []

    def _read(self, text: str, events: list[Event]) -> None:
        self._block.append(text)

    def _close(self, events: list[Event]) -> None:
        self._whole(self._take(), True, events)

    def _cut(self, events: list[Event]) -> None:
        self._whole(self._take(), False, events)

    def _take(self) -> str:
        block = "".join(self._block)
        self._block.clear()
        return block


class HermesParser(ToolCallParser):
    """`{"name": ..., "arguments": ...}`, the arguments passed on while they are sampled.

    Once the name is known the call is committed: its arguments are all that stands before the closing
    brace, which is what a template would write around them again.
    """

    def __init__(self, form: ToolCallFormat) -> None:
        super().__init__(form)
        self._header = ""
        self._call: int | None = None
        self._tail = ""  # may be the call's closing brace
        self._arguments: list[str] = []

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
        self._add_arguments(body, events)

    def _close(self, events: list[Event]) -> None:
        if self._call is None:
            self._whole(self._header, True, events)
        self._reset()

    def _cut(self, events: list[Event]) -> None:
        if self._call is None:
            self._whole(self._header, False, events)
        elif not _is_json("".join(self._arguments)):
            self._add_arguments(self._tail, events)
        self._reset()

    def _add_arguments(self, text: str, events: list[Event]) -> None:
        if text and self._call is not None:
            self._arguments.append(text)
            events.append(CallArguments(self._call, text))

    def _reset(self) -> None:
        self._header, self._call, self._tail = "", None, ""
        self._arguments.clear()


PARSERS: dict[str, type[ToolCallParser]] = {"hermes_json": HermesParser, "json_list": BlockParser}


def _name(literal: str) -> str | None:
    try:
        return _readable(json.loads(literal))
    except ValueError:
        return None


def _readable(name: Any) -> str | None:
    """The name, if it is one that a client can be told."""
    return name if isinstance(name, str) and name and name.isprintable() else None


def _calls(block: str) -> list[tuple[str, str]] | None:
    """Names and arguments of the calls in a block of JSON; None where it is something else."""
    try:
        value = json.loads(block)
    except (ValueError, RecursionError):
        return None
    calls = [_call(item) for item in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call is not None] if calls and None not in calls else None


def _call(item: Any) -> tuple[str, str] | None:
    name = _readable(item.get("name")) if isinstance(item, dict) else None
    if name is None:
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return name, text.encode("utf-8", "replace").decode()  # an escape may have named half a surrogate pair


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
