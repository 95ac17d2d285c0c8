"""OpenAI Responses: requests to canonical turns. Answers: `responses_reply`; items: `items`.

`previous_response_id` and `item_reference` name answers of the same session; a client that sends its
whole history needs neither.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titogym.gateway.errors import RequestError
from titogym.gateway.protocols.base import Context, WireProtocol
from titogym.gateway.protocols.errors import openai_error
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
from titogym.gateway.protocols.items import CUSTOM_PARAMETERS, ItemReader, ToolNames, input_items
from titogym.gateway.protocols.responses_reply import ResponsesReply
from titogym.gateway.protocols.tool_choice import openai_choice
from titogym.gateway.sessions.spec import Sampling
from titogym.gateway.sessions.tree import Node, Receipt, Tree, conversation
from titogym.gateway.sessions.turn import TurnRequest
from titogym.templates.conversation import Message, Prefix
from titogym.templates.tokenizer import Tokenizer

_REFUSED = {
    "background": "The gateway answers while the client waits: remove background.",
    "conversation": "Conversations are not stored apart: use previous_response_id.",
    "image": "Only text is supported: remove image.",
    "prompt": "Prompt templates are not stored: send their text as instructions or input.",
}
_TRUNCATION = "nothing is left out of a conversation that grows too long: it is refused"
_IGNORED = {
    "truncation": _TRUNCATION,
    "max_tool_calls": "it bounds tools that run at the provider, and none does",
    "top_logprobs": "log-probs are collected with the session's trajectories",
    "access_programs": "they are the provider's",
    "background_options": "nothing runs in the background",
    "client_metadata": "a session is labelled when it is created",
    "stream_options": "the stream has no options",
}
_READ = {
    *("model", "input", "instructions", "previous_response_id", "stream", "store", "include", "tools"),
    *("tool_choice", "parallel_tool_calls", "reasoning", "text", "temperature", "top_p"),
    *("max_output_tokens", "metadata"),
}
_ENCRYPTED = "reasoning.encrypted_content"
_ECHOED = ("temperature", "top_p", "max_output_tokens", "previous_response_id", "metadata")


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A parsed request: the turn that it asks for, and how its answer is to be written."""

    turn: TurnRequest

    def reply(self, tokenizer: Tokenizer, receipt: Receipt) -> ResponsesReply:
        return ResponsesReply(receipt, self.turn.prefix, _instructions(self.turn, receipt), tokenizer)


def parse(body: Any, context: Context) -> ResponsesRequest:
    """Raises `RequestError` for what cannot be served, naming the field."""
    body, ignored = checked(body, _READ, _REFUSED, _IGNORED)
    if body.get("truncation") == "disabled":
        del ignored["truncation"]
    tools, names = _tools(body.get("tools"), ignored)
    choice = openai_choice(body, tools, ignored)
    echo = _echo(body, context, names, ignored)
    turn = TurnRequest(
        prefix=Prefix(tools=tools, kwargs=_kwargs(body, context, ignored)),
        messages=_messages(body, context, ignored),
        sampling=_sampling(body),
        stream=boolean(body, "stream"),
        choice=choice,
        ignored=ignored,
        schema_field="text.format",
        receipt=context.receipt("resp_", **echo),
    )
    return ResponsesRequest(turn)


PROTOCOL = WireProtocol("responses", parse, openai_error)


def stored(tree: Tree, id: str) -> Node:
    """The node whose answer is the response `id`. Raises `RequestError` (404)."""
    node = tree.answers.get(id)
    if node is None or not id.startswith("resp_"):
        raise RequestError(f"Response with id '{id}' not found.", status=404, code="response_not_found")
    if node.receipt.echo.get("store") is False:
        raise RequestError(
            f"Response with id '{id}' was not stored: its request said so.",
            status=404,
            code="response_not_found",
        )
    return node


def retrieved(node: Node, tokenizer: Tokenizer) -> ResponsesReply:
    """Writes a stored response once more."""
    instructions = conversation(node)[0].content if node.receipt.echo.get("instructed") else ""
    return ResponsesReply(node.receipt, node.prefix, instructions, tokenizer)


def items_page(node: Node, query: Mapping[str, str]) -> dict[str, Any]:
    """What a stored response was asked with, as pages of items. Raises `RequestError`."""
    echo = node.receipt.echo
    names = ToolNames(tuple(echo.get("custom", ())), tuple(echo.get("namespaces", ())))
    items = input_items(node, names)
    if query.get("order") == "asc":
        items.reverse()
    ids = [item["id"] for item in items]
    limit = query.get("limit", "20")
    if not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= 100:
        raise RequestError("limit must be a number from 1 to 100.", param="limit")
    after = query.get("after")
    if after is not None and after not in ids:
        raise RequestError(f"after: there is no item {after!r}.", param="after")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(items),
    }


def _instructions(turn: TurnRequest, receipt: Receipt) -> str:
    return turn.messages[0].content if receipt.echo.get("instructed") else ""


# --- fields ---------------------------------------------------------------------------------------


def _messages(body: Mapping[str, Any], context: Context, ignored: dict[str, str]) -> tuple[Message, ...]:
    instructions = string(body.get("instructions"), "instructions")
    before: list[Message] = []
    previous = string(body.get("previous_response_id"), "previous_response_id")
    if previous:
        node = _previous(context.tree, previous)
        before = conversation(node)
        if node.receipt.echo.get("instructed"):
            before = before[1:]  # they hold for their own response alone
    head = [Message("system", instructions)] if instructions else []
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    read = ItemReader(context.tree, ignored).messages(sequence(items, "input"))
    if not (before or read):
        raise RequestError("input must be a string or a list with at least one item.", param="input")
    return (*head, *before, *read)


def _previous(tree: Tree, id: str) -> Node:
    try:
        return stored(tree, id)
    except RequestError as error:
        raise RequestError(
            f"Previous response: {error.message}",
            code="previous_response_not_found",
            param="previous_response_id",
        ) from None


def _sampling(body: Mapping[str, Any]) -> Sampling:
    options = {name: body.get(name) for name in ("temperature", "top_p")}
    options["max_tokens"] = body.get("max_output_tokens")
    options["json_schema"] = json_schema(_text(body).get("format"), "text.format")
    return sampling(options, {"max_tokens": "max_output_tokens"})


def _text(body: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(body.get("text"), "text")


def _kwargs(body: Mapping[str, Any], context: Context, ignored: dict[str, str]) -> dict[str, Any]:
    reasoning = mapping(body.get("reasoning"), "reasoning")
    for name in ("summary", "generate_summary"):
        if reasoning.get(name) is not None:
            ignored[f"reasoning.{name}"] = "reasoning is given in full"
    note(reasoning, ("effort", "summary", "generate_summary"), "reasoning", ignored)
    note(_text(body), ("format",), "text", ignored)
    return template_kwargs(context.family, ignored, effort=("reasoning.effort", reasoning.get("effort")))


def _echo(
    body: Mapping[str, Any], context: Context, names: ToolNames, ignored: dict[str, str]
) -> dict[str, Any]:
    """What the response object repeats of its request, beyond what the session holds anyway."""
    include = [string(item, "include") for item in sequence(body.get("include"), "include")]
    for item in include:
        if item != _ENCRYPTED:
            ignored[f"include.{item}"] = "there is no such output"
    echo = {name: body[name] for name in _ECHOED if body.get(name) is not None}
    mapping(echo.get("metadata"), "metadata")
    for name in ("reasoning", "text"):
        if body.get(name) is not None:
            echo[name] = mapping(body[name], name)
    if not boolean(body, "store", True):
        echo["store"] = False
    if not boolean(body, "parallel_tool_calls", True):
        echo["parallel_tool_calls"] = False
    if _ENCRYPTED in include:
        echo["encrypted"] = True
    if body.get("instructions"):
        echo["instructed"] = True
    if body.get("tool_choice") is not None:
        echo["tool_choice"] = body["tool_choice"]
    echo["model"] = string(body.get("model"), "model") or context.model
    return {**echo, **names.plain()}


def _tools(value: Any, ignored: dict[str, str]) -> tuple[tuple[dict[str, Any], ...], ToolNames]:
    custom: list[str] = []
    namespaces: list[str] = []
    made: list[dict[str, Any]] = []

    def add(tool: Any, where: str, namespace: str = "") -> None:
        kind = string(element(tool, where).get("type"), f"{where}.type")
        name = string(tool.get("name"), f"{where}.name")
        called = ToolNames.joined(namespace, name)
        if kind == "function":
            note(tool, ("type", "name", "description", "parameters"), "tools[]", ignored)
            made.append(function(called, tool.get("description"), tool.get("parameters"), where))
        elif kind == "custom":
            note(tool, ("type", "name", "description"), "tools[]", ignored)
            custom.append(called)
            made.append(function(called, tool.get("description"), CUSTOM_PARAMETERS, where))
        elif kind == "namespace" and not namespace and name:
            namespaces.append(name)
            for i, inner in enumerate(sequence(tool.get("tools"), f"{where}.tools")):
                add(inner, f"{where}.tools[{i}]", name)
        elif hosted(kind):
            ignored[f"tools.{kind}"] = "it runs at the provider: give the model a tool for it"
        else:
            raise RequestError(f"{where}: tools of type {kind!r} are not supported.", param=where)

    for i, tool in enumerate(sequence(value, "tools")):
        add(tool, f"tools[{i}]")
    return tuple(made), ToolNames(tuple(custom), tuple(namespaces))
