"""Splitting content from the blocks in which an answer calls tools.

A block whose call has a readable name is a call, its arguments given as they were sampled, valid JSON
or not: the harness answers a bad call better than we can. Any other block is content, word for word.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from titogym.gateway.tokens.parsers.events import CallArguments, CallStart, Content, Event
from titogym.gateway.tokens.parsers.scan import overlap
from titogym.templates.family import ToolCallFormat


def new_call_id() -> str:
    """An id of our own: unguessable, so that its echo proves which call is meant."""
    return "call_" + secrets.token_hex(12)


class ToolCallParser(ABC):
    """Finds where blocks begin; a subclass reads one block and finds where it ends.

    The layout that templates write ahead of a block belongs to the block, and white space between
    two blocks to neither.
    """

    def __init__(self, form: ToolCallFormat, tools: Sequence[dict[str, Any]] = ()) -> None:
        """`tools` are the request's definitions, for formats that leave the types of arguments to them."""
        self._begin = form.begin.strip()
        self._end = form.end.strip()
        self._lead = form.lead
        self._starts = tuple(form.lead[at:] + self._begin for at in range(len(form.lead) + 1))
        self._buffer = ""  # outside a block: text that may belong to the next marker
        self._in_block = False
        self._opening = ""  # what opened the block, to give back if it is no call
        self._calls = 0
        self._past_call = False  # nothing but white space has followed the last call

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        rest: str | None = text
        while rest is not None:
            rest = self._inside(rest, events) if self._in_block else self._outside(rest, events)
        return events

    def flush(self) -> list[Event]:
        events: list[Event] = []
        if self._in_block:
            self._cut(events)
            self._in_block = False
        if not (self._past_call and self._buffer.isspace()):
            self._content(self._buffer, events)
        self._buffer = ""
        return events

    def _outside(self, text: str, events: list[Event]) -> str | None:
        text, self._buffer = self._buffer + text, ""
        at = text.find(self._begin)
        if at >= 0:
            before = text[:at]
            # As much of the layout as there is, from its end.
            layout = next(
                size
                for size in range(len(self._lead), -1, -1)
                if before.endswith(self._lead[-size:] if size else "")
            )
            before = before[: len(before) - layout]
            self._opening = text[len(before) : at + len(self._begin)]
            if self._past_call and (not before or before.isspace()):
                self._opening = before + self._opening
            else:
                self._content(before, events)
            self._in_block = True
            self._enter()
            return text[at + len(self._begin) :]
        keep = len(text) - max(overlap(text, start) for start in self._starts)
        if self._past_call and text[:keep].isspace():
            keep = 0
        self._content(text[:keep], events)
        self._buffer = text[keep:]
        return None

    def _content(self, text: str, events: list[Event]) -> None:
        if text:
            self._past_call = False
            events.append(Content(text))

    def _start(self, name: str, events: list[Event], native_id: str = "") -> int:
        index = self._calls
        self._calls += 1
        self._past_call = True
        events.append(CallStart(index, new_call_id(), name, native_id))
        return index

    def _arguments(self, text: str, events: list[Event]) -> None:
        """A further piece of the latest call's arguments."""
        if text:
            events.append(CallArguments(self._calls - 1, text))

    @abstractmethod
    def _enter(self) -> None:
        """A block begins."""

    @abstractmethod
    def _inside(self, text: str, events: list[Event]) -> str | None:
        """Take text from inside the block; what follows the block once it has ended."""

    @abstractmethod
    def _cut(self, events: list[Event]) -> None:
        """The answer ended inside the block."""


def readable(name: Any) -> str | None:
    """The name, if it is one that a client can be told."""
    return name if isinstance(name, str) and name and name.isprintable() else None
