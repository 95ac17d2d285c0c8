"""Matchers for single programs, which their files name by dotted path."""

from dataclasses import replace

from titogym.gateway.sessions.matchers import MATCHERS, Matcher
from titogym.templates.conversation import Message

_OMIT_REASONING = MATCHERS["omit_reasoning"]
_CALLED = "\nCalling tools:\n"


def _without_its_report(message: Message) -> bytes:
    if message.role == "assistant":
        message = replace(message, content=message.content.partition(_CALLED)[0])
    return _OMIT_REASONING.key(message)


# smolagents writes below each answer, in the same message, which tool it has called for it.
smolagents = Matcher("smolagents", _without_its_report, _OMIT_REASONING.accepts)
