"""Items of OpenAI Responses: what a conversation and an answer are made of on that wire.

The ids of an answer's items carry the answer's own id: by them items that belong together find each
other again, and an `item_reference` finds its item.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from titogym.gateway.errors import RequestError
from titogym.gateway.protocols.base import seal, unseal
from titogym.gateway.protocols.fields import element, sequence, string
from titogym.gateway.sessions.tree import Node, Tree
from titogym.templates.conversation import Message, Role, ToolCall

CUSTOM_PARAMETERS = {  # how a template is told of a tool that takes text
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
_ITEM_ID = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]{24})(?:_([0-9]{1,6}))?")
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


@dataclass(frozen=True, slots=True)
class ToolNames:
    """Tools that go by another name, or in another form, on the wire than in the template."""

    custom: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()

    @staticmethod
    def joined(namespace: str, name: str) -> str:
        return f"{namespace}__{name}" if namespace and name else name

    def plain(self) -> dict[str, list[str]]:
        found = {"custom": list(self.custom), "namespaces": list(self.namespaces)}
        return {key: value for key, value in found.items() if value}

    def wire(self, call: ToolCall) -> dict[str, Any]:
        """The keys of the call's item that name the tool and what it is given."""
        namespace = next((n for n in self.namespaces if call.name.startswith(f"{n}__")), "")
        named = {"name": call.name.removeprefix(f"{namespace}__") if namespace else call.name}
        if namespace:
            named["namespace"] = namespace
        if call.name in self.custom:
            return {"type": "custom_tool_call", **named, "input": _custom_input(call.arguments)}
        return {"type": "function_call", **named, "arguments": call.arguments}


def _custom_input(arguments: str) -> str:
    """The text that a custom tool is given. Arguments that are not as they should be are the text."""
    try:
        given = orjson.loads(arguments)["input"]
    except (ValueError, LookupError, TypeError):
        return arguments
    return given if isinstance(given, str) else arguments


def reasoning_item(id: str, text: str, encrypted: bool) -> dict[str, Any]:
    """`id` is the response's."""
    item: dict[str, Any] = {"type": "reasoning", "id": item_id("rs", id), "summary": []}
    item["content"] = [{"type": "reasoning_text", "text": text}] if text else []
    item["encrypted_content"] = seal(id) if encrypted else None
    return item


def message_item(id: str, text: str, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    item = {"type": "message", "id": item_id("msg", id), "role": "assistant", "status": status}
    return {**item, "content": [part]}


def call_item(id: str, index: int, call: ToolCall, names: ToolNames, status: str) -> dict[str, Any]:
    wire = names.wire(call)
    kind = "ctc" if wire["type"] == "custom_tool_call" else "fc"
    return {**wire, "id": item_id(kind, id, index), "call_id": call.id, "status": status}


def item_id(kind: str, response: str, number: int | None = None) -> str:
    suffix = "" if number is None else f"_{number}"
    return f"{kind}_{response.removeprefix('resp_')}{suffix}"


def answer_items(id: str, answer: Message, names: ToolNames, encrypted: bool) -> list[dict[str, Any]]:
    """A whole answer as items: never none, or a client that sends them back would leave the answer out."""
    items = [reasoning_item(id, answer.reasoning, encrypted)] if answer.reasoning else []
    if answer.content or not (answer.reasoning or answer.tool_calls):
        items.append(message_item(id, answer.content, "completed"))
    calls = enumerate(answer.tool_calls)
    return items + [call_item(id, i, call, names, "completed") for i, call in calls]


def input_items(node: Node, names: ToolNames) -> list[dict[str, Any]]:
    """What came before `node`'s answer, as items: its own messages, then its parent's answer, and so on.

    The latest come first. Instructions are no items.
    """
    items: list[dict[str, Any]] = []
    step: Node | None = node
    while step is not None:
        items += reversed(_asked_items(step, names))
        step = step.parent
        if step is not None:
            items += reversed(answer_items(step.receipt.id, step.answer, names, False))
    if node.receipt.echo.get("instructed"):
        items.pop()
    return items


def _asked_items(node: Node, names: ToolNames) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for i, message in enumerate(node.messages):
        id = f"{node.receipt.id}_{i}"
        if message.role == "tool":
            item = {"type": "function_call_output", "id": item_id("fco", id), "status": "completed"}
            items.append({**item, "call_id": message.tool_call_id, "output": message.content})
        elif message.role == "assistant":
            items += answer_items(id, message, names, False)
        else:
            part = {"type": "input_text", "text": message.content}
            item = {"type": "message", "id": item_id("msg", id), "role": message.role}
            items.append({**item, "status": "completed", "content": [part]})
    return items


@dataclass(slots=True)
class _Answer:
    """An assistant message while its items are read. `source` is the answer that they are known to be of."""

    source: Node | None = None
    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()

    def takes(self, kind: str, source: Node | None) -> bool:
        """Whether the next item belongs to it too: reasoning comes first, then text, then calls."""
        if source is not None and self.source is not None:
            return source is self.source
        if kind == "reasoning":
            return not (self.content or self.calls)
        return kind == "call" or not (self.content or self.calls)

    def message(self) -> Message:
        return Message("assistant", self.content, self.reasoning, self.calls)


class ItemReader:
    """Canonical messages of a request's items."""

    def __init__(self, tree: Tree, ignored: dict[str, str]) -> None:
        self._tree = tree
        self._ignored = ignored
        self._read: list[Message] = []
        self._answer: _Answer | None = None
        self._kinds: dict[str, Callable[[Mapping[str, Any], str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._call,
            "custom_tool_call": self._call,
            "function_call_output": self._output,
            "custom_tool_call_output": self._output,
            "item_reference": self._reference,
        }

    def messages(self, items: list[Any]) -> list[Message]:
        """Raises `RequestError`."""
        for i, item in enumerate(items):
            where = f"input[{i}]"
            kind = string(element(item, where).get("type"), f"{where}.type") or "message"
            if kind not in self._kinds:
                raise RequestError(f"{where}: items of type {kind!r} are not supported.", param=where)
            self._kinds[kind](item, where)
        self._end_answer()
        return self._read

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        wire_role = item.get("role")
        role = _ROLES.get(wire_role) if isinstance(wire_role, str) else None
        if role is None:
            known = ", ".join(_ROLES)
            raise RequestError(f"{where}.role must be one of {known}.", param=f"{where}.role")
        text = self._text(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._part("message", item).content += text
        else:
            self._end_answer()
            self._read.append(Message(role, text))

    def _reasoning(self, item: Mapping[str, Any], where: str) -> None:
        said = self._text(item.get("content"), f"{where}.content")
        said = said or self._text(item.get("summary"), f"{where}.summary")
        sealed = string(item.get("encrypted_content"), f"{where}.encrypted_content")
        source = self._tree.answers.get(unseal(sealed)) or self._source(item)
        if not said and source is not None:
            said = source.answer.reasoning
        elif not said and sealed:
            self._ignored["reasoning.encrypted_content"] = "only its provider can read it"
        self._part("reasoning", item, source).reasoning += said

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        id = string(item.get("call_id"), f"{where}.call_id")
        namespace = string(item.get("namespace"), f"{where}.namespace")
        name = ToolNames.joined(namespace, string(item.get("name"), f"{where}.name"))
        if item["type"] == "function_call":
            arguments = string(item.get("arguments"), f"{where}.arguments")
        else:
            given = string(item.get("input"), f"{where}.input")
            sampled = self._tree.calls.get(id)
            if sampled is not None and _custom_input(sampled.arguments) == given:
                arguments = sampled.arguments
            else:
                arguments = orjson.dumps({"input": given}).decode()
        self._part("call", item).calls += (ToolCall(id, name, arguments),)

    def _output(self, item: Mapping[str, Any], where: str) -> None:
        id = string(item.get("call_id"), f"{where}.call_id")
        if not id:
            param = f"{where}.call_id"
            raise RequestError(f"{param} must name the call that it answers.", param=param)
        self._end_answer()
        self._read.append(Message("tool", self._text(item.get("output"), f"{where}.output"), tool_call_id=id))

    def _reference(self, item: Mapping[str, Any], where: str) -> None:
        id = string(item.get("id"), f"{where}.id")
        source = self._source(item)
        if source is None or source.receipt.echo.get("store") is False:
            raise _no_item(id, where)
        kind = id.partition("_")[0]
        if kind == "rs":
            self._part("reasoning", item).reasoning = source.answer.reasoning
        elif kind == "msg":
            self._part("message", item).content = source.answer.content
        else:
            found = _ITEM_ID.fullmatch(id)
            index = int(found[2] or 0) if found else 0
            if index >= len(source.answer.tool_calls):
                raise _no_item(id, where)
            self._part("call", item).calls += source.answer.tool_calls[index : index + 1]

    def _source(self, item: Mapping[str, Any]) -> Node | None:
        """The answer of this session that the item is of, as its id says."""
        id = item.get("id")
        found = _ITEM_ID.fullmatch(id) if isinstance(id, str) else None
        return self._tree.answers.get(f"resp_{found[1]}") if found else None

    def _part(self, kind: str, item: Mapping[str, Any], source: Node | None = None) -> _Answer:
        """The assistant message that the item belongs to."""
        source = source or self._source(item)
        if self._answer is not None and not self._answer.takes(kind, source):
            self._end_answer()
        if self._answer is None:
            self._answer = _Answer()
        self._answer.source = self._answer.source or source
        return self._answer

    def _end_answer(self) -> None:
        if self._answer is not None:
            self._read.append(self._answer.message())
            self._answer = None

    def _text(self, value: Any, where: str) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        texts = []
        for i, part in enumerate(sequence(value, where)):
            kind = element(part, f"{where}[{i}]").get("type")
            text = part.get("refusal" if kind == "refusal" else "text")
            if kind not in _TEXTS or not isinstance(text, str):
                raise RequestError(
                    f"{where}[{i}]: parts of type {kind!r} are not supported, only text.", param=where
                )
            texts.append(text)
        return "".join(texts)


def _no_item(id: str, where: str) -> RequestError:
    return RequestError(f"{where}: item with id '{id}' not found.", status=404, param=where)


_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
