"""Splitting reasoning from what follows it."""

from titogym.gateway.tokens.parsers.events import Content, Event, Reasoning
from titogym.gateway.tokens.parsers.scan import overlap
from titogym.templates.family import ReasoningFormat

# Layout: what templates write around the marks. Dropped where it is there, not missed where it is not.
_AFTER_BEGIN = "\n"
_BEFORE_END = "\n"
_AFTER_END = "\n\n"


class ReasoningSplitter:
    """Reasoning stands at the answer's start, between the format's marks; all else is content.

    With `opened` the prompt has written the first mark. Reasoning that never ends (the answer was cut)
    is all reasoning.
    """

    def __init__(self, form: ReasoningFormat | None, opened: bool) -> None:
        self._begin = form.begin.strip() if form else ""
        self._end = form.end.strip() if form else ""
        self._state = "content" if form is None else "reasoning" if opened else "start"
        self._buffer = ""
        self._skip = _AFTER_BEGIN if opened else ""  # layout that may still follow

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        events: list[Event] = []
        if self._state == "start" and not self._decided():
            return events
        self._drop_layout()
        if self._state == "reasoning":
            at = self._buffer.find(self._end)
            if at >= 0:
                inside, self._buffer = self._buffer[:at], self._buffer[at + len(self._end) :]
                _add(events, Reasoning, inside.removesuffix(_BEFORE_END))
                self._state, self._skip = "content", _AFTER_END
                self._drop_layout()
            else:
                held = max(overlap(self._buffer, _BEFORE_END + self._end), overlap(self._buffer, self._end))
                keep = len(self._buffer) - held
                _add(events, Reasoning, self._buffer[:keep])
                self._buffer = self._buffer[keep:]
        if self._state == "content":
            _add(events, Content, self._buffer)
            self._buffer = ""
        return events

    def flush(self) -> list[Event]:
        events: list[Event] = []
        _add(events, Reasoning if self._state == "reasoning" else Content, self._buffer)
        self._buffer = ""
        return events

    def _decided(self) -> bool:
        """Whether the answer is known to begin with reasoning, or known not to."""
        text = self._buffer.lstrip()
        if text.startswith(self._begin):
            self._buffer = text[len(self._begin) :]
            self._state, self._skip = "reasoning", _AFTER_BEGIN
        elif self._begin.startswith(text):
            return False
        else:
            self._state = "content"
        return True

    def _drop_layout(self) -> None:
        while self._skip and self._buffer:
            if not self._buffer.startswith(self._skip[0]):
                self._skip = ""
                return
            self._buffer, self._skip = self._buffer[1:], self._skip[1:]


def _add(events: list[Event], kind: type[Reasoning] | type[Content], text: str) -> None:
    if text:
        events.append(kind(text))
