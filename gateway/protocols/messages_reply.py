"""Anthropic Messages: answers."""

from dataclasses import dataclass, field
from typing import Any

import orjson

from titogym.gateway.errors import RequestError
from titogym.gateway.protocols.arguments import ObjectPrefix, wire_value
from titogym.gateway.protocols.base import event, seal
from titogym.gateway.protocols.errors import anthropic_error
from titogym.gateway.sessions.tree import Receipt
from titogym.gateway.sessions.turn import Committed, Delta, told
from titogym.gateway.tokens.parsers.events import CallArguments, CallStart, Content, Event, Reasoning

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(slots=True)
class MessagesReply:
    """Writes one answer as a message. One content block is open at a time."""

    receipt: Receipt
    model: str
    keep_alive: bytes = event({"type": "ping"}, "ping")
    _prompt_tokens: int = 0
    _blocks: int = 0
    _open: str = ""  # type of the block that is open
    _input: ObjectPrefix = field(default_factory=ObjectPrefix)

    def planned(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens

    def open(self) -> bytes:
        usage = _usage(self._prompt_tokens, 0, 0)
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _named("message_start", message=message) + self.keep_alive

    def delta(self, delta: Delta) -> bytes:
        return b"".join([self._event(event) for event in delta.events])

    def close(self, committed: Committed) -> bytes:
        return b"".join(
            [
                self._end_block(),
                _named("message_delta", delta=_stop(committed), usage=_committed_usage(committed)),
                _named("message_stop"),
            ]
        )

    def whole(self, committed: Committed) -> bytes:
        answer = told(committed.node)
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            signature = seal(self.receipt.id)
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": signature})
        if answer.content:
            content.append({"type": "text", "text": answer.content})
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": wire_value(call.arguments)}
            for call in answer.tool_calls
        ]
        usage = _committed_usage(committed)
        return orjson.dumps({**self._head(), "content": content, **_stop(committed), "usage": usage})

    def failure(self, error: RequestError) -> bytes:
        return event(anthropic_error(error), "error")

    def _head(self) -> dict[str, Any]:
        return {"id": self.receipt.id, "type": "message", "role": "assistant", "model": self.model}

    def _event(self, event: Event) -> bytes:
        match event:
            case Reasoning(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                return self._in(block) + self._delta({"type": "thinking_delta", "thinking": text})
            case Content(text):
                block = {"type": "text", "text": ""}
                return self._in(block) + self._delta({"type": "text_delta", "text": text})
            case CallStart(_, id, name):
                self._input = ObjectPrefix()
                ended = self._end_block()
                return ended + self._in({"type": "tool_use", "id": id, "name": name, "input": {}})
            case CallArguments(_, text):
                told = self._input.push(text)
                return self._delta({"type": "input_json_delta", "partial_json": told}) if told else b""

    def _in(self, block: dict[str, Any]) -> bytes:
        """Be in a block of that type: the open one, or a new one."""
        if self._open == block["type"]:
            return b""
        ended = self._end_block()
        self._open = block["type"]
        return ended + _named("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _named("content_block_delta", index=self._blocks, delta=delta)

    def _end_block(self) -> bytes:
        if not self._open:
            return b""
        last = b""
        if self._open == "thinking":
            last = self._delta({"type": "signature_delta", "signature": seal(self.receipt.id)})
        stop = _named("content_block_stop", index=self._blocks)
        self._open, self._blocks = "", self._blocks + 1
        return last + stop


def _named(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name)


def _stop(committed: Committed) -> dict[str, Any]:
    """Why the answer ended: by itself, by a stop sequence, by a call, or cut."""
    stop = committed.node.generation.stop
    reason = _STOP_REASONS[committed.finish_reason]
    if isinstance(stop, str) and committed.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": reason, "stop_sequence": None}


def _committed_usage(committed: Committed) -> dict[str, int]:
    return _usage(committed.prompt_tokens, committed.cached_tokens, committed.completion_tokens)


def _usage(prompt: int, cached: int, completion: int) -> dict[str, int]:
    """Anthropic counts what was read from the cache apart from the rest of the prompt."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }
