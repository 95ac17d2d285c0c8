"""Calls whose parts stand between marks of their own (`marked_json`, `markup`).

Once its name is known a call is committed, and its arguments flow while they are sampled. A block in which
no call could be found is content, word for word.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from titogym.gateway.tokens.parsers.blocks import ToolCallParser, readable
from titogym.gateway.tokens.parsers.events import Event
from titogym.gateway.tokens.parsers.scan import JsonFence, overlap
from titogym.gateway.tokens.parsers.typed import ArgumentTypes, flows, to_json
from titogym.templates.family import CallMarks, ToolCallFormat

_LONGEST_NAME = 1024
State = Callable[[list[Event]], bool]  # takes a step; False when it needs more text


class _MarkedParser(ToolCallParser):
    """Reads a block from mark to mark; a subclass reads what follows a call's name."""

    def __init__(self, form: ToolCallFormat, tools: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(form, tools)
        assert form.marks is not None
        self._marks: CallMarks = form.marks
        self._ids = _pattern(form.ids) if form.ids else None
        # A block without an end mark lasts until the next begins.
        self._block_end = self._end or self._begin
        self._text = ""  # of the block, not yet read
        self._searched = 0  # how much of it holds none of the marks that are looked for
        self._raw: list[str] | None = []  # the whole block, while it has no call
        self._state: State = self._between

    def _enter(self) -> None:
        self._text, self._searched, self._raw = "", 0, []
        # Without a mark of its own, a call begins with its block.
        self._state = self._between if self._marks.call.strip() else self._name

    def _inside(self, text: str, events: list[Event]) -> str | None:
        self._text += text
        if self._raw is not None:
            self._raw.append(text)
        while self._state(events):
            if not self._in_block:
                rest = self._text
                if self._raw is not None:
                    block = "".join(self._raw)
                    end = len(rest) if self._end else len(rest) + len(self._begin)
                    self._content(self._opening + block[: len(block) - end], events)
                return rest if self._end else self._begin + rest
        return None

    def _cut(self, events: list[Event]) -> None:
        self._cut_call(events)
        if self._raw is not None:
            self._content(self._opening + "".join(self._raw), events)

    def _until(self, *marks: str) -> tuple[str, str] | None:
        """Read up to the first of `marks` and past it: what stands before it, and which it is."""
        found = [(at, mark) for mark in marks if mark and (at := self._text.find(mark, self._searched)) >= 0]
        if not found:
            self._searched = max(0, len(self._text) - max(map(len, marks)) + 1)
            return None
        at, mark = min(found)
        before, self._text, self._searched = self._text[:at], self._text[at + len(mark) :], 0
        return before, mark

    def _leave(self) -> bool:
        self._in_block = False
        return True

    def _between(self, events: list[Event]) -> bool:
        found = self._until(self._marks.call.strip(), self._block_end)
        if found is None:
            return False
        if found[1] == self._block_end:
            return self._leave()
        self._state = self._name
        return True

    def _lost(self, events: list[Event]) -> bool:
        """What began as a call is none: nothing but the block's end counts."""
        return self._until(self._block_end) is not None and self._leave()

    def _name(self, events: list[Event]) -> bool:
        ends = (self._marks.named,) if self._marks.named else (self._marks.key, self._marks.end)
        found = self._until(*ends, self._block_end)
        if found is None:
            if len(self._text) <= _LONGEST_NAME:
                return False
            self._state = self._lost
            return True
        header, mark = found
        name, native_id = self._named(header.strip())
        bare = mark == self._block_end and bool(self._marks.named)  # the mark behind the name is missing
        if name is None or bare:
            self._state = self._between if self._marks.call.strip() else self._lost
            return mark != self._block_end or self._leave()
        self._raw = None
        self._start(name, events, native_id)
        self._called(name, mark, events)
        return True

    def _named(self, header: str) -> tuple[str | None, str]:
        """The name in what stands between the marks, and the model's own id of the call."""
        if self._marks.id:
            name, _, native_id = header.partition(self._marks.id)
            return readable(name.strip()), native_id.strip()
        if self._ids is not None:
            found = self._ids.fullmatch(header)
            return readable(found["name"] if found else None), header
        return readable(header), ""

    @abstractmethod
    def _called(self, name: str, mark: str, events: list[Event]) -> None:
        """A call has begun, its name ended by `mark`; set the state that reads on."""

    @abstractmethod
    def _cut_call(self, events: list[Event]) -> None:
        """The answer ended: give what is held back of a call's arguments."""


class MarkedJsonParser(_MarkedParser):
    """The arguments are JSON, passed on as they are; an end mark inside a string does not end them."""

    def _called(self, name: str, mark: str, events: list[Event]) -> None:
        self._fence = JsonFence(self._marks.end.strip() or self._block_end)
        self._state = self._json

    def _json(self, events: list[Event]) -> bool:
        text, self._text = self._text, ""
        inside, rest = self._fence.push(text)
        self._arguments(inside, events)
        if rest is None:
            return False
        self._text, self._state = rest, self._between
        return bool(self._marks.end) or self._leave()

    def _cut_call(self, events: list[Event]) -> None:
        if self._state == self._json:
            self._arguments(self._fence.flush(), events)


class MarkupParser(_MarkedParser):
    """Each argument has a marked name and value; together they are written as a JSON object."""

    def __init__(self, form: ToolCallFormat, tools: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(form, tools)
        self._types = ArgumentTypes(tools)
        self._tool = ""
        self._count = 0  # arguments of the call so far
        self._declared: frozenset[str] = frozenset()  # types of the argument
        self._at_start = False  # of a value

    def _called(self, name: str, mark: str, events: list[Event]) -> None:
        self._tool, self._count = name, 0
        self._between_arguments(mark, events)

    def _between_arguments(self, mark: str, events: list[Event]) -> None:
        """Go on behind `mark`."""
        if mark == self._marks.key:
            self._state = self._key
        elif mark in (self._marks.end, self._block_end):
            self._arguments("}" if self._count else "{}", events)
            self._state = self._between if self._marks.call else self._lost
            if mark == self._block_end:
                self._leave()
        else:
            self._state = self._argument

    def _argument(self, events: list[Event]) -> bool:
        found = self._until(self._marks.key, self._marks.end, self._block_end)
        if found is not None:
            self._between_arguments(found[1], events)
        return found is not None

    def _key(self, events: list[Event]) -> bool:
        found = self._until(self._marks.keyed, self._block_end)
        if found is None:
            return False
        key, mark = found
        if mark == self._block_end:
            self._between_arguments(mark, events)
            return True
        self._declared = self._types.of(self._tool, key)
        if self._marks.is_string:
            key, _, is_string = key.rpartition(self._marks.is_string)
            self._declared = frozenset({"string"} if is_string == "true" else {"any"})
        self._arguments(
            ("{" if self._count == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": ", events
        )
        self._count += 1
        self._at_start = True
        if flows(self._declared):
            self._arguments('"', events)
        self._state = self._value_mark if self._marks.value else self._value
        return True

    def _value_mark(self, events: list[Event]) -> bool:
        found = self._until(self._marks.value, self._block_end)
        if found is None:
            return False
        if found[1] == self._block_end:
            self._arguments('"' if flows(self._declared) else "null", events)
            self._between_arguments(self._block_end, events)
        else:
            self._state = self._value
        return True

    def _value(self, events: list[Event]) -> bool:
        pad = self._marks.pad
        if self._at_start and self._text:
            self._text, self._at_start = self._text.removeprefix(pad), False
            self._searched = 0
        found = self._until(self._marks.valued, self._block_end)
        if found is None:
            if flows(self._declared):
                ends = (self._marks.valued, self._block_end)
                size = len(self._text) - max(
                    overlap(self._text, lead + end) for end in ends for lead in (pad, "")
                )
                self._string(self._text[:size], events)
                self._text, self._searched = self._text[size:], 0
            return False
        text, mark = found
        text = text.removesuffix(pad)
        if flows(self._declared):
            self._string(text, events)
            self._arguments('"', events)
        else:
            self._arguments(to_json(text, self._declared), events)
        self._state = self._argument
        if mark == self._block_end:
            self._between_arguments(mark, events)
        return True

    def _string(self, text: str, events: list[Event]) -> None:
        self._arguments(json.dumps(text, ensure_ascii=False)[1:-1], events)

    def _cut_call(self, events: list[Event]) -> None:
        if self._state == self._value:
            if flows(self._declared):
                self._string(self._text, events)
            else:
                self._arguments(self._text, events)


def _pattern(ids: str) -> re.Pattern[str]:
    """Matches ids of the family's format, and plain names, but no bare numbers."""
    before, after = map(re.escape, ids.split("{name}"))
    after = after.replace(re.escape("{number}"), "[0-9]+")
    return re.compile(f"(?:{before})?(?P<name>(?![0-9]+$).+?)(?:{after})?")
