"""From sampled tokens to an assistant message, while they arrive."""

from collections.abc import Sequence
from typing import Any

from titogym.gateway.tokens.parsers.events import Collector, Content, Event
from titogym.gateway.tokens.parsers.harmony import HarmonyParser
from titogym.gateway.tokens.parsers.reasoning import ReasoningSplitter
from titogym.gateway.tokens.parsers.scan import StopStrings
from titogym.gateway.tokens.parsers.tool_calls import HARMONY, PARSERS
from titogym.templates.conversation import Message
from titogym.templates.family import Family
from titogym.templates.tokenizer import Tokenizer

# Parsers copy what is left of a piece at each mark in it: pieces of a bounded length (characters) keep the
# time of an answer that comes whole, and is full of marks, proportional to its length.
_PIECE = 2048


class AnswerParser:
    """Decodes and parses one answer, each token once.

    `stop_ids` end a turn and are no text; `opened` says that the prompt left reasoning open; without
    `calls` (the request offers no tools) what looks like a tool call is content. `tools` are the
    definitions of the request, whose types some formats of calls need.
    """

    def __init__(
        self,
        family: Family,
        tokenizer: Tokenizer,
        *,
        stop_ids: frozenset[int],
        stops: Sequence[str] = (),
        opened: bool = False,
        calls: bool = True,
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._decoder = tokenizer.stream()
        self._stop_ids = stop_ids
        self._last: list[int] = []  # a stop token that may be the last
        self._stops = StopStrings(stops)
        form = family.tool_calls
        self._split: ReasoningSplitter | HarmonyParser
        if form is not None and form.kind == HARMONY:
            self._split, form = HarmonyParser(calls), None
        else:
            self._split = ReasoningSplitter(family.reasoning, opened)
        self._calls = PARSERS[form.kind](form, tools) if form and calls else None
        self._collector = Collector()

    def begin(self, ids: Sequence[int]) -> list[Event]:
        """Events of what was there of the answer before anything was sampled; no stop string ends it."""
        return self._collect(self._split.push(self._decoder.push(list(ids))))

    def push(self, ids: Sequence[int]) -> list[Event]:
        """Events of the tokens that arrived."""
        ids, self._last = [*self._last, *ids], []
        if ids and ids[-1] in self._stop_ids:
            self._last = [ids.pop()]
        text = self._decoder.push(ids)
        events: list[Event] = []
        for at in range(0, len(text), _PIECE):
            events += self._collect(self._split.push(self._stops.push(text[at : at + _PIECE])))
        return events

    def finish(self) -> list[Event]:
        """The last events. A stop token at the end has done its work and is dropped."""
        text = self._stops.push(self._decoder.flush()) + self._stops.flush()
        return self._collect([*self._split.push(text), *self._split.flush()], last=True)

    def message(self) -> Message:
        """The whole message, once `finish` was called."""
        return self._collector.message()

    def _collect(self, split: list[Event], last: bool = False) -> list[Event]:
        if self._calls is None:
            events = split
        else:
            events = []
            for event in split:
                events += self._calls.push(event.text) if isinstance(event, Content) else [event]
            if last:
                events += self._calls.flush()
        self._collector.add(events)
        return events
