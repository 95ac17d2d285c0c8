"""Anthropic Messages: requests to canonical turns. Answers: `messages_reply`.

Text blocks of one message are paragraphs; those of an answer are pieces, as they were sampled. A tool
call's `input` is a value and no text: where it is the one that a call of this session had, the call keeps
the text that the model wrote.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from titogym.gateway.errors import RequestError
from titogym.gateway.protocols.arguments import same_value
from titogym.gateway.protocols.base import Context, WireProtocol, unseal
from titogym.gateway.protocols.errors import anthropic_error
from titogym.gateway.protocols.fields import (
    boolean,
    checked,
    element,
    function,
    hosted,
    json_schema,
    mapping,
    note,
    sampling,
    sequence,
    string,
    template_kwargs,
)
from titogym.gateway.protocols.messages_reply import MessagesReply
from titogym.gateway.protocols.tool_choice import anthropic_choice
from titogym.gateway.sessions.spec import Sampling
from titogym.gateway.sessions.tree import Receipt
from titogym.gateway.sessions.turn import BEGUN, TurnRequest
from titogym.templates.conversation import Message, Prefix, ToolCall
from titogym.templates.tokenizer import Tokenizer

_REFUSED = {
    "container": "The gateway has no containers: give the model a tool for it.",
    "mcp_servers": "The gateway connects to no MCP servers: give the model their tools.",
}
_IGNORED = {
    "cache_control": "a session's prefix is cached on its engine anyway",
    "inference_geo": "the engines are where they are",
    "speed": "there is one speed",
    "user_profile_id": "a session has one user",
    "workspace_id": "a session has one workspace",
    "diagnostics": "see the session's own diagnostics",
}
_READ = {
    *("model", "messages", "system", "max_tokens", "stream", "temperature", "top_p", "top_k"),
    *("stop_sequences", "tools", "tool_choice", "thinking", "output_config", "output_format"),
}
_BILLING = "x-anthropic-billing-header:"  # told to the provider in a system block, and new in each request
_ERROR = "The tool failed."
_TOOL_KEYS = {"type", "name", "description", "input_schema"}


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A parsed request: the turn that it asks for, and how its answer is to be written."""

    turn: TurnRequest
    model: str

    def reply(self, tokenizer: Tokenizer, receipt: Receipt) -> MessagesReply:
        return MessagesReply(receipt, self.model)


def parse(body: Any, context: Context) -> MessagesRequest:
    """Raises `RequestError` for what cannot be served, naming the field."""
    body, ignored = checked(body, _READ, _REFUSED, _IGNORED)
    if "anthropic-beta" in context.headers:
        ignored["anthropic-beta"] = "fields are served, or listed here, whatever the betas"
    tools = _tools(body.get("tools"), ignored)
    read, begun = _begun(_Reader(context, ignored).messages(body))
    turn = TurnRequest(
        prefix=Prefix(tools=tools, kwargs=_kwargs(body, context, ignored)),
        messages=(*_system(body.get("system"), ignored), *read),
        sampling=_sampling(body),
        stream=boolean(body, "stream"),
        choice=anthropic_choice(body, tools),
        ignored=ignored,
        schema_field="output_config.format",
        receipt=context.receipt("msg_", **({BEGUN: len(begun.content)} if begun else {})),
        begun=begun,
    )
    return MessagesRequest(turn, string(body.get("model"), "model") or context.model)


PROTOCOL = WireProtocol("messages", parse, anthropic_error)


# --- fields ---------------------------------------------------------------------------------------


def _sampling(body: Mapping[str, Any]) -> Sampling:
    if body.get("max_tokens") is None:
        raise RequestError("max_tokens: give the most tokens that the answer may have.", param="max_tokens")
    options = {name: body.get(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    options["stop"] = body.get("stop_sequences")
    output = mapping(body.get("output_config"), "output_config")
    options["json_schema"] = json_schema(output.get("format"), "output_config.format") or json_schema(
        body.get("output_format"), "output_format"
    )
    return sampling(options, {"stop": "stop_sequences"})


def _kwargs(body: Mapping[str, Any], context: Context, ignored: dict[str, str]) -> dict[str, Any]:
    thinking = mapping(body.get("thinking"), "thinking")
    output = mapping(body.get("output_config"), "output_config")
    kind = thinking.get("type")
    if thinking and kind not in ("enabled", "disabled", "adaptive"):
        raise RequestError("thinking.type must be enabled, disabled or adaptive.", param="thinking")
    if thinking.get("budget_tokens") is not None:
        ignored["thinking.budget_tokens"] = "the template has no budget of tokens for thinking"
    note(thinking, ("type", "budget_tokens"), "thinking", ignored)
    note(output, ("effort", "format"), "output_config", ignored)
    return template_kwargs(
        context.family,
        ignored,
        effort=("output_config.effort", output.get("effort")),
        thinking=("thinking", kind != "disabled" if thinking else None),
    )


def _tools(value: Any, ignored: dict[str, str]) -> tuple[dict[str, Any], ...]:
    made = []
    for i, tool in enumerate(sequence(value, "tools")):
        where = f"tools[{i}]"
        kind = string(element(tool, where).get("type"), f"{where}.type")
        if hosted(kind):
            ignored[f"tools.{kind}"] = "it runs at the provider: give the model a tool for it"
        elif kind in ("", "custom"):
            note(tool, _TOOL_KEYS, "tools[]", ignored)
            parameters = mapping(tool.get("input_schema"), f"{where}.input_schema")
            made.append(function(tool.get("name"), tool.get("description"), parameters, where))
        else:
            raise RequestError(f"{where}: tools of type {kind!r} are not supported.", param=where)
    return tuple(made)


# --- messages -------------------------------------------------------------------------------------


def _system(value: Any, ignored: dict[str, str]) -> list[Message]:
    if isinstance(value, list):
        kept = []
        for block in value:
            if isinstance(block, dict) and str(block.get("text")).startswith(_BILLING):
                ignored[f"system.{_BILLING[:-1]}"] = "it is for the provider and no part of the prompt"
            else:
                kept.append(block)
        value = kept
    text = _text(value, "system", ignored)
    return [Message("system", text)] if text else []


def _text(value: Any, where: str, ignored: dict[str, str]) -> str:
    """A string, or text blocks as paragraphs."""
    if value is None or isinstance(value, str):
        return value or ""
    return "\n".join(
        _paragraph(block, f"{where}[{i}]", ignored) for i, block in enumerate(sequence(value, where))
    )


def _paragraph(block: Any, where: str, ignored: dict[str, str]) -> str:
    kind = element(block, where).get("type")
    if kind != "text" or not isinstance(block.get("text"), str):
        raise RequestError(f"{where}: {kind!r} blocks are not supported here, only text.", param=where)
    note(block, ("type", "text", "citations"), "text", ignored)
    return str(block["text"])


def _begun(messages: list[Message]) -> tuple[list[Message], Message | None]:
    """The messages, and the beginning of the answer where they end with one. Raises `RequestError`."""
    last = messages[-1]
    if last.role != "assistant":
        return messages, None
    where = "messages[-1]"
    if last.tool_calls:
        raise RequestError("Calls of tools must be followed by their results.", param=where)
    if not last.content:
        raise RequestError("The beginning of an answer must end with text.", param=where)
    if len(messages) == 1:
        raise RequestError("An answer cannot come first: begin with a message of the user.", param=where)
    return messages[:-1], last


class _Reader:
    """Canonical messages of a request."""

    def __init__(self, context: Context, ignored: dict[str, str]) -> None:
        self._tree = context.tree
        self._ignored = ignored

    def messages(self, body: Mapping[str, Any]) -> list[Message]:
        """Raises `RequestError`."""
        items = body.get("messages")
        if not isinstance(items, list) or not items:
            raise RequestError("messages must be a list with at least one message.", param="messages")
        read: list[Message] = []
        for i, item in enumerate(items):
            where = f"messages[{i}]"
            role = element(item, where).get("role")
            content = item.get("content")
            if role == "user":
                read += self._user(content, f"{where}.content")
            elif role == "assistant":
                read.append(self._assistant(content, f"{where}.content"))
            elif role == "system":
                read.append(Message("system", _text(content, f"{where}.content", self._ignored)))
            else:
                raise RequestError(f"{where}.role must be user, assistant or system.", param=f"{where}.role")
        return read

    def _user(self, content: Any, where: str) -> list[Message]:
        """Results of tools and what the user says, in the order in which they stand."""
        if not isinstance(content, list):
            return [Message("user", _text(content, where, self._ignored))]
        read: list[Message] = []
        said: list[str] = []
        for i, block in enumerate(content):
            if element(block, f"{where}[{i}]").get("type") == "tool_result":
                if said:
                    read.append(Message("user", "\n".join(said)))
                    said = []
                read.append(self._result(block, f"{where}[{i}]"))
            else:
                said.append(_paragraph(block, f"{where}[{i}]", self._ignored))
        if said or not read:
            read.append(Message("user", "\n".join(said)))
        return read

    def _result(self, block: Mapping[str, Any], where: str) -> Message:
        id = string(block.get("tool_use_id"), f"{where}.tool_use_id")
        if not id:
            raise RequestError(f"{where}.tool_use_id must name the call that it answers.", param=where)
        note(block, ("type", "tool_use_id", "content", "is_error"), "tool_result", self._ignored)
        text = _text(block.get("content"), f"{where}.content", self._ignored)
        if boolean(block, "is_error"):
            self._ignored["tool_result.is_error"] = "templates have no mark for it: the result's text tells"
            text = text or _ERROR
        return Message("tool", text, tool_call_id=id)

    def _assistant(self, content: Any, where: str) -> Message:
        if not isinstance(content, list):
            return Message("assistant", _text(content, where, self._ignored))
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for i, block in enumerate(content):
            at = f"{where}[{i}]"
            match element(block, at).get("type"):
                case "thinking":
                    thoughts.append(self._thinking(block, at))
                case "redacted_thinking":
                    self._ignored["redacted_thinking"] = "only its provider can read it"
                case "tool_use":
                    calls.append(self._call(block, at))
                case _:
                    texts.append(_paragraph(block, at, self._ignored))
        return Message("assistant", "".join(texts), "".join(thoughts), tuple(calls))

    def _thinking(self, block: Mapping[str, Any], where: str) -> str:
        note(block, ("type", "thinking", "signature"), "thinking", self._ignored)
        said = string(block.get("thinking"), f"{where}.thinking")
        signature = string(block.get("signature"), f"{where}.signature")
        node = self._tree.answers.get(unseal(signature))
        return node.answer.reasoning if node is not None and not said else said

    def _call(self, block: Mapping[str, Any], where: str) -> ToolCall:
        note(block, ("type", "id", "name", "input", "caller"), "tool_use", self._ignored)
        id = string(block.get("id"), f"{where}.id")
        arguments = orjson.dumps(mapping(block.get("input"), f"{where}.input")).decode()
        sampled = self._tree.calls.get(id)
        if sampled is not None and same_value(sampled.arguments, arguments):
            arguments = sampled.arguments
        return ToolCall(id, string(block.get("name"), f"{where}.name"), arguments)
