"""OpenAI Chat Completions: requests to canonical turns, and answers back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from titogym.gateway.errors import RequestError
from titogym.gateway.protocols.base import COMMENT, Context, WireProtocol, event
from titogym.gateway.protocols.errors import openai_error
from titogym.gateway.protocols.fields import (
    boolean,
    checked,
    json_schema,
    mapping,
    sampling,
    string,
    template_kwargs,
)
from titogym.gateway.protocols.tool_choice import openai_choice
from titogym.gateway.sessions.spec import Sampling
from titogym.gateway.sessions.tree import Receipt
from titogym.gateway.sessions.turn import Committed, Delta, TurnRequest
from titogym.gateway.tokens.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from titogym.templates.conversation import Message, Prefix, Role, ToolCall
from titogym.templates.tokenizer import Tokenizer

_REFUSED = {
    "functions": "Use tools in place of functions.",
    "function_call": "Use tool_choice in place of function_call.",
    "logit_bias": "Biased logits are not supported: remove logit_bias.",
    "repetition_penalty": "Use frequency_penalty or presence_penalty in place of repetition_penalty.",
    "audio": "Only text is supported: remove audio.",
    "web_search_options": "Web search is not supported: give the model a tool for it.",
}
_IGNORED = {
    "return_token_ids": "tokens are collected with the session's trajectories",
    "prediction": "the engine has no use for a predicted output",
    "verbosity": "the model's template has no such setting",
    "store": "the session stores every turn",
    "session_id": "the session is named by the URL, the API key or the header x-titogym-session",
}
_LOOSE = "only a call that tool_choice asks for is held to its schema"
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "ignore_eos",
)
_READ = {
    *_SAMPLING,
    *("model", "messages", "tools", "tool_choice", "stream", "stream_options", "n", "stop", "logprobs"),
    *("max_tokens", "max_completion_tokens", "top_logprobs", "response_format", "reasoning_effort"),
    *("chat_template_kwargs", "modalities", "parallel_tool_calls"),
}
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A parsed request: the turn that it asks for, and how its answer is to be written."""

    turn: TurnRequest
    model: str
    include_usage: bool
    logprobs: bool

    def reply(self, tokenizer: Tokenizer, receipt: Receipt) -> "ChatReply":
        return ChatReply(self, tokenizer, receipt)


def parse(body: Any, context: Context) -> ChatRequest:
    """Raises `RequestError` for what cannot be served, naming the field."""
    body, ignored = checked(body, _READ, _REFUSED, _IGNORED)
    _check_values(body)
    kwargs = template_kwargs(
        context.family,
        ignored,
        asked=mapping(body.get("chat_template_kwargs"), "chat_template_kwargs"),
        effort=("reasoning_effort", body.get("reasoning_effort")),
    )
    tools = _tools(body.get("tools"), ignored)
    turn = TurnRequest(
        prefix=Prefix(tools=tools, kwargs=kwargs),
        messages=messages(body.get("messages")),
        sampling=_sampling(body),
        stream=boolean(body, "stream"),
        choice=openai_choice(body, tools, ignored, nested=True),
        ignored=ignored,
        receipt=context.receipt("chatcmpl-"),
    )
    return ChatRequest(
        turn=turn,
        model=string(body.get("model"), "model") or context.model,
        include_usage=bool(mapping(body.get("stream_options"), "stream_options").get("include_usage")),
        logprobs=boolean(body, "logprobs"),
    )


PROTOCOL = WireProtocol("chat", parse, openai_error)


# --- fields ---------------------------------------------------------------------------------------


def _check_values(body: Mapping[str, Any]) -> None:
    if body.get("n") not in (None, 1):
        raise RequestError("Only n=1 is supported: send one request per answer.", param="n")
    if body.get("top_logprobs"):
        raise RequestError(
            "Only the log-probs of sampled tokens are known: set top_logprobs to 0.", param="top_logprobs"
        )
    if body.get("modalities") not in (None, ["text"]):
        raise RequestError("Only text is supported: set modalities to ['text'].", param="modalities")


def _sampling(body: Mapping[str, Any]) -> Sampling:
    options = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    most = body.get("max_completion_tokens")
    options["max_tokens"] = body.get("max_tokens") if most is None else most
    stop = body.get("stop")
    options["stop"] = (stop,) if isinstance(stop, str) else stop
    options["json_schema"] = json_schema(body.get("response_format"), "response_format", "json_schema")
    return sampling(options, {} if most is None else {"max_tokens": "max_completion_tokens"})


def _tools(value: Any, ignored: dict[str, str]) -> tuple[dict[str, Any], ...]:
    tools = value or ()
    if not isinstance(tools, list | tuple):
        raise RequestError("tools must be a list.", param="tools")
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise RequestError(f"{where}: only tools of type 'function' are supported.", param=where)
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise RequestError(f"{where}.function must be an object with a name.", param=where)
        if not isinstance(function.get("parameters") or {}, dict):
            raise RequestError(f"{where}.function.parameters must be an object.", param=where)
        if function.get("strict"):
            ignored["tools[].function.strict"] = _LOOSE
    return tuple(tools)


# --- messages -------------------------------------------------------------------------------------


def messages(value: Any) -> tuple[Message, ...]:
    """Canonical messages of a request. Raises `RequestError`."""
    if not isinstance(value, list) or not value:
        raise RequestError("messages must be a list with at least one message.", param="messages")
    return tuple(_message(item, f"messages[{i}]") for i, item in enumerate(value))


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise RequestError(f"{where} must be an object.", param=where)
    wire_role = item.get("role")
    role = _ROLES.get(wire_role) if isinstance(wire_role, str) else None
    if role is None:
        known = ", ".join(_ROLES)
        raise RequestError(f"{where}.role must be one of {known}.", param=f"{where}.role")
    content = _content(item.get("content"), f"{where}.content")
    if role == "assistant":
        if item.get("function_call"):
            raise RequestError(f"{where}: use tool_calls in place of function_call.", param=where)
        reasoning = item.get("reasoning_content") or item.get("reasoning")
        return Message(
            role=role,
            content=content or string(item.get("refusal"), f"{where}.refusal"),
            reasoning=string(reasoning, f"{where}.reasoning_content"),
            tool_calls=_tool_calls(item.get("tool_calls"), f"{where}.tool_calls"),
        )
    if role == "tool":
        # Some clients name the call by the message's own id.
        call = string(item.get("tool_call_id") or item.get("id"), f"{where}.tool_call_id")
        if not call:
            param = f"{where}.tool_call_id"
            raise RequestError(f"{param} must name the call that it answers.", param=param)
        return Message(
            role=role, content=content, tool_call_id=call, name=string(item.get("name"), f"{where}.name")
        )
    return Message(role=role, content=content)


def _content(value: Any, where: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise RequestError(f"{where} must be a string or a list of parts.", param=where)
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(text, str):
            raise RequestError(f"{where}: parts of type {kind!r} are not supported, only text.", param=where)
        texts.append(text)
    return "".join(texts)


def _tool_calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    if not value:
        return ()
    if not isinstance(value, list):
        raise RequestError(f"{where} must be a list.", param=where)
    calls = []
    for i, item in enumerate(value):
        function = item.get("function") if isinstance(item, dict) else None
        if not isinstance(function, dict):
            raise RequestError(f"{where}[{i}] must be an object with a function.", param=f"{where}[{i}]")
        arguments = function.get("arguments")
        calls.append(
            ToolCall(
                id=string(item.get("id"), f"{where}[{i}].id"),
                name=string(function.get("name"), f"{where}[{i}].function.name"),
                # Some clients send the object in place of its text.
                arguments=orjson.dumps(arguments).decode()
                if isinstance(arguments, dict)
                else string(arguments, f"{where}[{i}].function.arguments"),
            )
        )
    return tuple(calls)


# --- answers --------------------------------------------------------------------------------------


@dataclass(slots=True)
class ChatReply:
    """Writes one answer as a chat completion."""

    request: ChatRequest
    tokenizer: Tokenizer
    receipt: Receipt
    keep_alive: bytes = COMMENT
    _unsent: list[dict[str, Any]] = field(default_factory=list)  # log-probs without an event yet

    def planned(self, prompt_tokens: int) -> None:
        pass

    def open(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> bytes:
        if self.request.logprobs:
            self._unsent += self._token_logprobs(delta.ids, delta.logprobs)
        return b"".join([self._chunk(_wire(event)) for event in delta.events])

    def close(self, committed: Committed) -> bytes:
        chunks = [self._chunk({}, committed.finish_reason)]
        if self.request.include_usage:
            chunks.append(event({**self._head(True), "choices": [], "usage": _usage(committed)}))
        return b"".join([*chunks, b"data: [DONE]\n\n"])

    def whole(self, committed: Committed) -> bytes:
        generation = committed.node.generation
        logprobs = None
        if self.request.logprobs:
            tokens = self._token_logprobs(generation.output_ids, generation.logprobs)
            logprobs = {"content": tokens, "refusal": None}
        choice = {
            "index": 0,
            "message": wire_message(committed.node.answer),
            "logprobs": logprobs,
            "finish_reason": committed.finish_reason,
        }
        return orjson.dumps({**self._head(False), "choices": [choice], "usage": _usage(committed)})

    def failure(self, error: RequestError) -> bytes:
        return event(openai_error(error))

    def _head(self, chunk: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if chunk else "chat.completion"
        id, created = self.receipt.id, self.receipt.created
        return {"id": id, "object": kind, "created": created, "model": self.request.model}

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        logprobs = None
        if self._unsent:
            logprobs, self._unsent = {"content": self._unsent, "refusal": None}, []
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self.request.include_usage else {}
        return event({**self._head(True), "choices": [choice], **usage})

    def _token_logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[dict[str, Any]]:
        return [
            {
                "token": self.tokenizer.decode([token]),
                "logprob": logprob,
                "bytes": list(self.tokenizer.token_bytes(token)),
                "top_logprobs": [],
            }
            for token, logprob in zip(ids, logprobs, strict=True)
        ]


def wire_message(message: Message) -> dict[str, Any]:
    """A message as Chat Completions writes it, reasoning in the field that servers agreed on."""
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "tool":
        wire["tool_call_id"] = message.tool_call_id
    if message.name:
        wire["name"] = message.name
    if message.role == "assistant":
        wire["refusal"] = None
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["content"] = message.content or None
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return wire


def _wire(event: Event) -> dict[str, Any]:
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _usage(committed: Committed) -> dict[str, Any]:
    prompt, completion = committed.prompt_tokens, committed.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": committed.cached_tokens},
    }
