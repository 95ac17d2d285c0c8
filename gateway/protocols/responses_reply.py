"""OpenAI Responses: answers."""

from dataclasses import dataclass, field
from typing import Any

import orjson

from titogym.gateway.errors import RequestError
from titogym.gateway.protocols.base import COMMENT, event
from titogym.gateway.protocols.items import ToolNames, answer_items, call_item, message_item, reasoning_item
from titogym.gateway.sessions.tree import Receipt
from titogym.gateway.sessions.turn import Committed, Delta
from titogym.gateway.tokens.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from titogym.templates.conversation import Prefix, ToolCall
from titogym.templates.tokenizer import Tokenizer


@dataclass(slots=True)
class ResponsesReply:
    """Writes one answer as a response. One item is open at a time."""

    receipt: Receipt
    prefix: Prefix
    instructions: str
    tokenizer: Tokenizer
    keep_alive: bytes = COMMENT
    _sequence: int = 0
    _items: list[dict[str, Any]] = field(default_factory=list)  # those that are done
    _open: str = ""  # kind of the item that is open
    _open_id: str = ""
    _pieces: list[str] = field(default_factory=list)  # its text so far
    _call: ToolCall = field(default_factory=lambda: ToolCall("", "", ""))
    _calls: int = 0

    def planned(self, prompt_tokens: int) -> None:
        pass

    def open(self) -> bytes:
        response = self._response("in_progress", [])
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def delta(self, delta: Delta) -> bytes:
        return b"".join([self._piece(event) for event in delta.events])

    def close(self, committed: Committed) -> bytes:
        begun = b"" if self._open or self._items else self._be_in("message")
        ended = begun + self._end_item()
        response = self._committed(committed, self._items)
        return ended + self._event(response["status"], response=response)

    def whole(self, committed: Committed) -> bytes:
        items = answer_items(self.receipt.id, committed.node.answer, self._names, self._encrypted)
        return orjson.dumps(self._committed(committed, items))

    def failure(self, error: RequestError) -> bytes:
        told = {"code": error.code, "message": error.message}
        response = {**self._response("failed", self._items), "error": told}
        flat = {"type": "error", **told, "param": error.param, "sequence_number": self._next()}
        return event(flat, "error") + self._event("failed", response=response)

    # --- the response object ----------------------------------------------------------------------

    @property
    def _names(self) -> ToolNames:
        echo = self.receipt.echo
        return ToolNames(tuple(echo.get("custom", ())), tuple(echo.get("namespaces", ())))

    @property
    def _encrypted(self) -> bool:
        return bool(self.receipt.echo.get("encrypted"))

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        echo = self.receipt.echo
        return {
            "id": self.receipt.id,
            "object": "response",
            "created_at": self.receipt.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": self.instructions or None,
            "max_output_tokens": echo.get("max_output_tokens"),
            "metadata": echo.get("metadata", {}),
            "model": echo.get("model", ""),
            "output": output,
            "parallel_tool_calls": echo.get("parallel_tool_calls", True),
            "previous_response_id": echo.get("previous_response_id"),
            "reasoning": {"effort": None, "summary": None, **echo.get("reasoning", {})},
            "service_tier": "default",
            "store": echo.get("store", True),
            "temperature": echo.get("temperature"),
            "text": {"format": {"type": "text"}, **echo.get("text", {})},
            "tool_choice": echo.get("tool_choice", "auto"),
            "tools": self._tools(),
            "top_p": echo.get("top_p"),
            "truncation": "disabled",
            "usage": None,
        }

    def _tools(self) -> list[dict[str, Any]]:
        """The tools as they are called. Those of a namespace stand by their joined names."""
        made = []
        for tool in self.prefix.tools:
            name, description = tool["function"]["name"], tool["function"].get("description")
            if name in self._names.custom:
                made.append({"type": "custom", "name": name, "description": description})
            else:
                parameters = tool["function"].get("parameters", {})
                shape = {"type": "function", "name": name, "description": description}
                made.append({**shape, "parameters": parameters, "strict": False})
        return made

    def _committed(self, committed: Committed, output: list[dict[str, Any]]) -> dict[str, Any]:
        cut = committed.finish_reason == "length"
        response = self._response("incomplete" if cut else "completed", output)
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            seconds = committed.node.generation.timings.total
            response["completed_at"] = int(self.receipt.created + seconds)
        return {**response, "usage": self._usage(committed)}

    def _usage(self, committed: Committed) -> dict[str, Any]:
        prompt, completion = committed.prompt_tokens, committed.completion_tokens
        reasoning = len(self.tokenizer.encode_plain(committed.node.answer.reasoning))
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": committed.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": min(reasoning, completion)},
            "total_tokens": prompt + completion,
        }

    # --- the stream -------------------------------------------------------------------------------

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    def _event(self, kind: str, /, **data: Any) -> bytes:
        kind = f"response.{kind}"
        return event({"type": kind, "sequence_number": self._next(), **data}, kind)

    def _piece(self, event: Event) -> bytes:
        match event:
            case Reasoning(text):
                return self._be_in("reasoning") + self._text("reasoning_text.delta", text)
            case Content(text):
                return self._be_in("message") + self._text("output_text.delta", text, logprobs=[])
            case CallStart(_, id, name):
                ended = self._end_item()
                self._call = ToolCall(id, name, "")
                return ended + self._be_in("call")
            case CallArguments(_, text):
                self._pieces.append(text)
                if self._call.name in self._names.custom:  # its text is inside the arguments
                    return b""
                return self._event("function_call_arguments.delta", **self._at(), delta=text)

    def _text(self, name: str, text: str, **more: Any) -> bytes:
        self._pieces.append(text)
        return self._event(name, **self._at(), content_index=0, delta=text, **more)

    def _be_in(self, kind: str) -> bytes:
        """Be in an item of that kind: the open one, or a new one."""
        if self._open == kind:
            return b""
        ended = self._end_item()
        self._open = kind
        item = self._item("in_progress")
        self._open_id = item["id"]
        if kind != "call":
            item["content"] = []
        added = self._event("output_item.added", output_index=len(self._items), item=item)
        if kind == "call":
            return ended + added
        part = self._event("content_part.added", **self._at(), content_index=0, part=self._part())
        return ended + added + part

    def _end_item(self) -> bytes:
        if not self._open:
            return b""
        text, at = "".join(self._pieces), self._at()
        item = self._item("completed")
        if self._open == "call":
            if item["type"] == "custom_tool_call":
                told = self._event("custom_tool_call_input.delta", **at, delta=item["input"])
                told += self._event("custom_tool_call_input.done", **at, input=item["input"])
            else:
                name = item["name"]
                told = self._event("function_call_arguments.done", **at, arguments=text, name=name)
            self._calls += 1
        else:
            if self._open == "reasoning":
                told = self._event("reasoning_text.done", **at, content_index=0, text=text)
            else:
                told = self._event("output_text.done", **at, content_index=0, text=text, logprobs=[])
            told += self._event("content_part.done", **at, content_index=0, part=self._part())
        done = self._event("output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open, self._pieces = "", []
        return told + done

    def _item(self, status: str) -> dict[str, Any]:
        """The open item as it stands."""
        id, text = self.receipt.id, "".join(self._pieces)
        if self._open == "call":
            call = ToolCall(self._call.id, self._call.name, text)
            item = call_item(id, self._calls, call, self._names, status)
            return {**item, "input": ""} if status == "in_progress" and "input" in item else item
        if self._open == "message":
            item = message_item(id, text, status)
        else:
            item = reasoning_item(id, text, self._encrypted)
        return {**item, "id": self._id(item["id"])}

    def _id(self, id: str) -> str:
        """An answer that goes back and forth between reasoning and text has several items of a kind."""
        taken = sum(item["id"].startswith(id) for item in self._items)
        return f"{id}_{taken}" if taken else id

    def _part(self) -> dict[str, Any]:
        text = "".join(self._pieces)
        if self._open == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._open_id, "output_index": len(self._items)}
