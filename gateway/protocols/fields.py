"""Reading the fields of a request, alike in every protocol.

Each field of a request is honoured, mapped, refused by name, or listed in the session's diagnostics as
ignored; none is dropped in silence.
"""

from collections.abc import Iterable, Mapping, Set
from typing import Any

import orjson
from pydantic import ValidationError

from titogym.gateway.errors import RequestError
from titogym.gateway.protocols.schemas import has_instance
from titogym.gateway.sessions.spec import Sampling, fault
from titogym.templates.family import Family

_TOKENS = "The gateway alone decides which tokens are sent and kept; remove this field."
_OURS = "The gateway captures tokens and log-probs of every turn itself; remove this field."
ENGINE_FIELDS = {  # of inference engines, refused in every protocol
    **dict.fromkeys(
        (
            *("input_ids", "prompt_token_ids", "prompt_ids", "token_ids", "output_ids", "input_embeds"),
            *("prompt_embeds", "continue_final_message", "add_generation_prompt", "chat_template"),
            "lora_path",
        ),
        _TOKENS,
    ),
    **dict.fromkeys(
        (
            *("return_logprob", "logprob_start_len", "token_ids_logprob", "prompt_logprobs"),
            *("return_hidden_states", "return_routed_experts", "routed_experts_start_len", "rid"),
        ),
        _OURS,
    ),
}
HARMLESS: dict[str, tuple[Any, ...]] = {  # values that ask for nothing, or for what happens anyway
    "logit_bias": ({},),
    "repetition_penalty": (1,),
    "return_logprob": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "background": (False,),
    "mcp_servers": ([],),
}
CACHED = "a session's prefix is cached on its engine anyway"
IGNORED = {
    "metadata": "a session is labelled when it is created",
    "user": "a session has one user",
    "safety_identifier": "a session has one user",
    "service_tier": "there is one tier",
    "moderation": "there is no moderation",
    "prompt_cache_key": CACHED,
    "prompt_cache_options": CACHED,
    "prompt_cache_retention": CACHED,
    "context_management": "a session's history is never edited",
}
_HOSTED = ("web_search", "web_fetch", "tool_search", "image_generation")  # extras that a harness can lack
# How hard to think, in the words of the families that have degrees of it.
_DEGREES = {"none": "low", "minimal": "low", "low": "low", "medium": "medium"}
_SWITCHES = ("enable_thinking", "thinking")


def checked(
    body: Any, read: Set[str], refused: Mapping[str, str], ignored: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The body, and the fields that will have no effect, each with the reason.

    Raises `RequestError` for a body that is no object, and for what must be refused.
    """
    if not isinstance(body, dict):
        raise RequestError("The request body must be a JSON object.")
    for name, reason in {**ENGINE_FIELDS, **refused}.items():
        value = body.get(name)
        if value is not None and value not in HARMLESS.get(name, ()):
            raise RequestError(f"{name} is not accepted. {reason}", param=name, code="unsupported_parameter")
    unread = body.keys() - read - refused.keys() - ENGINE_FIELDS.keys()
    reasons = {**IGNORED, **ignored}
    return body, {
        name: reasons.get(name, "it has no effect here")
        for name in sorted(unread)
        if body[name] is not None and body[name] not in HARMLESS.get(name, ())
    }


def sampling(options: Mapping[str, Any], wire_names: Mapping[str, str]) -> Sampling:
    """`wire_names` says what the protocol calls an option, where it has another name for it."""
    try:
        return Sampling.model_validate(options)
    except ValidationError as error:
        key, message = fault(error)
        name = key.partition(".")[0]
        name = wire_names.get(name, name)
        raise RequestError(f"{name}: {message}", param=name) from None


def json_schema(wanted: Any, param: str, inside: str = "") -> str | None:
    """The schema that an answer must follow, from a format of type text, json_object or json_schema.

    `inside` is the key of the object that holds the schema, where the format does not hold it itself.
    """
    wanted = mapping(wanted, param)
    match wanted.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return '{"type": "object"}'
        case "json_schema":
            holder = mapping(wanted.get(inside), f"{param}.{inside}") if inside else wanted
            where = f"{param}.{inside}" if inside else param
            if isinstance(holder.get("schema"), dict):
                if not has_instance(holder["schema"]):
                    raise RequestError(f"{where}.schema: nothing can match it.", param=param)
                return orjson.dumps(holder["schema"]).decode()
            raise RequestError(f"{where}.schema must be an object.", param=param)
        case other:
            raise RequestError(f"{param} type {other!r} is not supported.", param=param)


def template_kwargs(
    family: Family,
    ignored: dict[str, str],
    *,
    asked: Mapping[str, Any] | None = None,
    effort: tuple[str, Any] = ("", None),
    thinking: tuple[str, bool | None] = ("", None),
) -> dict[str, Any]:
    """Arguments of the family's template that are not its defaults.

    `asked` are arguments by name; `effort` (how hard to think) and `thinking` (whether to think at all)
    are fields of the protocol with their values. What the template has no argument for goes to `ignored`.
    """
    kwargs = {}
    for name, value in (asked or {}).items():
        if name in family.kwargs:
            kwargs[name] = value
        else:
            ignored[f"chat_template_kwargs.{name}"] = f"the {family.name} template has no such argument"
    switch = next((name for name in _SWITCHES if name in family.kwargs), None)
    (effort_field, degree), (thinking_field, think) = effort, thinking
    if degree is not None:
        string(degree, effort_field)
    if "reasoning_effort" in family.kwargs:
        if think is False:
            degree = "low"
        if degree is not None:
            kwargs.setdefault("reasoning_effort", _DEGREES.get(degree, "high"))
    elif switch is not None:
        if think is not None:
            kwargs.setdefault(switch, think)
        elif degree is not None:
            kwargs.setdefault(switch, degree not in ("none", "minimal"))
    else:
        for name, value in ((effort_field, degree), (thinking_field, think)):
            if value is not None:
                ignored[name] = f"the {family.name} template has no such setting"
    return {name: value for name, value in kwargs.items() if value != family.default_kwargs[name]}


def function(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """A tool as templates are given it: the same from every protocol."""
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where} must have a name.", param=where)
    if not isinstance(parameters or {}, dict):
        raise RequestError(f"{where}: the parameters must be an object.", param=where)
    made: dict[str, Any] = {"name": name}
    if description is not None:
        made["description"] = string(description, f"{where}.description")
    made["parameters"] = parameters or {}
    return {"type": "function", "function": made}


def hosted(kind: str) -> bool:
    """Whether a tool of this type runs at the model's provider, and is one that agents do without."""
    return kind.startswith(_HOSTED)


def boolean(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false.", param=name)
    return value


def mapping(value: Any, param: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise RequestError(f"{param} must be an object.", param=param)
    return value or {}


def element(value: Any, param: str) -> Mapping[str, Any]:
    """An object that must be there."""
    if not isinstance(value, dict):
        raise RequestError(f"{param} must be an object.", param=param)
    return value


def sequence(value: Any, param: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise RequestError(f"{param} must be a list.", param=param)
    return value or []


def string(value: Any, param: str) -> str:
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{param} must be a string.", param=param)
    return value or ""


def note(block: Mapping[str, Any], known: Iterable[str], where: str, ignored: dict[str, str]) -> None:
    """List the keys of a part of the request that nobody reads."""
    for key in block.keys() - set(known):
        if block[key] is not None:
            ignored[f"{where}.{key}"] = CACHED if key == "cache_control" else "it has no effect here"
