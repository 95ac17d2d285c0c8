"""Calls that are JSON objects with no marks around them (`bare_json`).

An answer that begins with `{` may be calls or an object for the user to read, and only its end tells; so such
an answer is held back, and is content unless all of it is calls. So is what follows the begin mark.
"""

import json
import re

from titogym.gateway.tokens.parsers.blocks import ToolCallParser
from titogym.gateway.tokens.parsers.events import Event
from titogym.gateway.tokens.parsers.json_calls import call_of

_SEPARATOR = re.compile(r"[\s;]*")


class BareJsonParser(ToolCallParser):
    """One JSON object per call, set apart by semicolons or white space, up to the answer's end."""

    _block = ""
    _started = False

    def push(self, text: str) -> list[Event]:
        if not self._started and text:
            first = (self._buffer + text).lstrip()[:1]
            if not first:
                self._buffer += text
                return []
            self._started = True
            if first == "{":
                self._opening, self._block, self._buffer = "", self._buffer, ""
                self._in_block = True
        return super().push(text)

    def _enter(self) -> None:
        self._block = ""

    def _inside(self, text: str, events: list[Event]) -> str | None:
        self._block += text
        return None

    def _cut(self, events: list[Event]) -> None:
        calls = _all_calls(self._block)
        if calls is None:
            self._content(self._opening + self._block, events)
            return
        for name, arguments in calls:
            self._start(name, events)
            self._arguments(arguments, events)


def _all_calls(text: str) -> list[tuple[str, str]] | None:
    decoder = json.JSONDecoder()
    calls = []
    at = _end_of_separator(text, 0)
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        call = call_of(value)
        if call is None or not value.keys() & {"arguments", "parameters"}:
            return None
        calls.append(call)
        at = _end_of_separator(text, at)
    return calls or None


def _end_of_separator(text: str, at: int) -> int:
    found = _SEPARATOR.match(text, at)
    return found.end() if found else at
