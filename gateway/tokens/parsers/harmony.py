"""Answers of gpt-oss, which are messages on channels (the harmony format).

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.bash
    <|constrain|>json<|message|>{...}<|call|>

The analysis channel is reasoning; a message to a function, on any channel, is a call; all else is content.
The prompt ends behind `<|start|>assistant`, and the token that ends the turn is no text.
"""

import re
from collections.abc import Callable
from functools import partial

from titogym.gateway.tokens.parsers.blocks import new_call_id, readable
from titogym.gateway.tokens.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from titogym.gateway.tokens.parsers.scan import overlap

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_LONGEST_HEADER = 1024
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?:\s*to=(?P<early>[^\s<]+))?\s*<\|channel\|>(?P<channel>analysis|commentary|final)"
    r"(?:\s*to=(?P<late>[^\s<]+))?\s*(?:<\|constrain\|>)?\w*\s*"
)


class HarmonyParser:
    """Reads the whole answer. With `calls` off (the request offers no tools) calls are content too."""

    def __init__(self, calls: bool) -> None:
        self._allowed = calls
        self._text = ""
        self._inside = False  # the body of a message
        self._emit: Callable[[str], Event] = Content
        self._calls = 0
        self._seen: set[Callable[[str], Event]] = set()

    def push(self, text: str) -> list[Event]:
        self._text += text
        events: list[Event] = []
        while self._body(events) if self._inside else self._header(events):
            pass
        return events

    def flush(self) -> list[Event]:
        events: list[Event] = []
        if self._inside:
            self._add(self._text, events)
        # A message of which only the first token was sampled is none: the row's next message begins with it.
        elif self._text.strip() not in ("", "<|start|>"):
            events.append(Content(self._text))
        self._text = ""
        return events

    def _header(self, events: list[Event]) -> bool:
        found = [(at, mark) for mark in (_MESSAGE, *_ENDS) if (at := self._text.find(mark, 1)) >= 0]
        if not found and len(self._text) <= _LONGEST_HEADER:
            return False
        at, mark = min(found) if found else (_LONGEST_HEADER, "")
        if mark != _MESSAGE or at + len(mark) > _LONGEST_HEADER or not self._begin(self._text[:at], events):
            # No message of this format: what stands here is content, word for word.
            self._emit = Content
            self._add(self._text[:1], events)
            self._text = self._text[1:]
        else:
            self._text = self._text[at + len(mark) :]
        self._inside = True
        return True

    def _begin(self, header: str, events: list[Event]) -> bool:
        """Begin the message that this header announces; False where it is no header."""
        found = _HEADER.fullmatch(header)
        recipient = (found["early"] or found["late"]) if found else None
        if found is None or (recipient and not self._allowed):
            return False
        if recipient:
            name = readable(recipient.removeprefix("functions."))
            if name is None:
                return False
            index, self._calls = self._calls, self._calls + 1
            events.append(CallStart(index, new_call_id(), name))
            self._emit = partial(CallArguments, index)
            return True
        self._emit = Reasoning if found["channel"] == "analysis" else Content
        if self._emit in self._seen:  # several messages of a kind are paragraphs
            events.append(self._emit("\n\n"))
        self._seen.add(self._emit)
        return True

    def _body(self, events: list[Event]) -> bool:
        found = [(at, end) for end in _ENDS if (at := self._text.find(end)) >= 0]
        if found:
            at, end = min(found)
            self._add(self._text[:at], events)
            # A message may begin although the last was not ended.
            self._text = self._text[at if end == "<|start|>" else at + len(end) :]
            self._inside = False
            return True
        keep = len(self._text) - max(overlap(self._text, end) for end in _ENDS)
        self._add(self._text[:keep], events)
        self._text = self._text[keep:]
        return False

    def _add(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(self._emit(text))
