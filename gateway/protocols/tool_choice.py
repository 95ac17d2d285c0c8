"""Whether an answer may call tools, must, or may call one alone: the words of each protocol for it."""

from collections.abc import Mapping, Sequence
from typing import Any

from titogym.gateway.errors import RequestError
from titogym.gateway.protocols.fields import boolean, element, mapping, sequence, string
from titogym.gateway.protocols.items import ToolNames
from titogym.gateway.protocols.schemas import has_instance
from titogym.gateway.sessions.turn import ToolChoice

_FIELD = "tool_choice"
_PARALLEL = "parallel_tool_calls"
_ALLOWED = "which tools are allowed is part of the prompt, unless a call is required"


def openai_choice(
    body: Mapping[str, Any],
    tools: Sequence[dict[str, Any]],
    ignored: dict[str, str],
    nested: bool = False,
) -> ToolChoice:
    """Of Chat Completions and Responses. With `nested` a choice holds what it chooses under its type's name.

    Raises `RequestError`.
    """
    choice = body.get(_FIELD)
    single = "" if boolean(body, _PARALLEL, True) else _PARALLEL
    if choice is None or isinstance(choice, str):
        return _by_word(choice or "auto", {"required": "any"}, tools, single)
    choice = element(choice, _FIELD)
    if choice.get("type") == "allowed_tools":
        inner = mapping(choice.get("allowed_tools"), f"{_FIELD}.allowed_tools") if nested else choice
        names = [_name(tool, nested) for tool in sequence(inner.get("tools"), f"{_FIELD}.tools")]
        if inner.get("mode", "auto") != "required":
            ignored[f"{_FIELD}.allowed_tools"] = _ALLOWED
            return _by_word(inner.get("mode", "auto"), {}, tools, single)
        return _forced(names, tools, single)
    return _forced([_name(choice, nested)], tools, single)


def anthropic_choice(body: Mapping[str, Any], tools: Sequence[dict[str, Any]]) -> ToolChoice:
    """Raises `RequestError`."""
    choice = mapping(body.get(_FIELD), _FIELD)
    single = f"{_FIELD}.disable_parallel_tool_use" if boolean(choice, "disable_parallel_tool_use") else ""
    if choice.get("type") == "tool":
        return _forced([string(choice.get("name"), f"{_FIELD}.name")], tools, single)
    return _by_word(choice.get("type", "auto"), {"any": "any"}, tools, single)


def _by_word(word: Any, any_: Mapping[str, str], tools: Sequence[dict[str, Any]], single: str) -> ToolChoice:
    if word == "none" or (word == "auto" and not tools):
        return ToolChoice(may=False)
    if word == "auto":
        return ToolChoice(may=True, single=single)
    if isinstance(word, str) and word in any_:
        return _forced([tool["function"]["name"] for tool in tools], tools, single)
    known = ", ".join(("auto", "none", *any_))
    raise RequestError(f"{_FIELD} must be one of {known}, or name a function.", param=_FIELD)


def _forced(names: Sequence[str], tools: Sequence[dict[str, Any]], single: str) -> ToolChoice:
    given = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    if not names:
        raise RequestError(f"{_FIELD} asks for a call, but there are no tools to call.", param=_FIELD)
    for name in names:
        if name not in given:
            raise RequestError(f"{_FIELD}: there is no tool {name!r} among the tools.", param=_FIELD)
        if not has_instance(given[name]):
            raise RequestError(f"{_FIELD}: nothing can match the parameters of {name!r}.", param=_FIELD)
    return ToolChoice(may=True, must=tuple(dict.fromkeys(names)), single=single)


def _name(choice: Any, nested: bool) -> str:
    kind = element(choice, _FIELD).get("type")
    if kind not in ("function", "custom"):
        raise RequestError(f"{_FIELD}: a tool of type {kind!r} cannot be called for.", param=_FIELD)
    holder = mapping(choice.get(kind), f"{_FIELD}.{kind}") if nested else choice
    return ToolNames.joined(
        string(holder.get("namespace"), f"{_FIELD}.namespace"), string(holder.get("name"), f"{_FIELD}.name")
    )
