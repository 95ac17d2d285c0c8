"""When a replayed message counts as one that the session holds.

A matcher is a pair of functions. Messages that count as the same have the same `key`, which makes
finding a node a lookup of hashes; `accepts` then judges what a key cannot express, because it is no
equivalence (a replay *may lack* its reasoning, but must not have another one).
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from titogym.dotted import load
from titogym.errors import UserError
from titogym.templates.conversation import Message

ISSUED_ID = re.compile(r"call_[0-9a-f]{24}")


def _always(stored: Message, replayed: Message) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Matcher:
    """`accepts(stored, replayed)` is only asked of messages with equal keys.

    With `skips_empty` a replayed assistant message that says nothing need not have been sampled: some
    harnesses keep one of an answer that failed.
    """

    name: str
    key: Callable[[Message], bytes]
    accepts: Callable[[Message, Message], bool] = _always
    skips_empty: bool = False


def pack(fields: Iterable[str]) -> bytes:
    """Fields with their lengths ahead, so that no two lists of fields share their bytes."""
    return "".join([f"{len(text)}:{text}" for text in fields]).encode("utf-8", "surrogatepass")


def _key(message: Message, arguments: Callable[[str], str]) -> bytes:
    if message.role == "assistant":
        fields = ["assistant", message.content, message.reasoning]
        for call in message.tool_calls:
            fields += (call.id, call.name, arguments(call.arguments))
        return pack(fields)
    return pack((message.role, message.content, message.tool_call_id, message.name))


def canonical_arguments(text: str) -> str:
    """One spelling for every JSON serialisation of the same arguments; text that is no JSON stays itself.

    Key order, whitespace, escapes and the spelling of a number do not count; absent means `{}`.
    A number never equals a string or a boolean.
    """
    if not text.strip():
        return "{}"
    try:
        value = json.loads(text, parse_float=_number, parse_constant=_refuse)
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return "raw:" + text


def _number(text: str) -> int | float:
    """1.0 and 1 are one number: JavaScript writes the first as the second."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _strict_key(message: Message) -> bytes:
    return _key(message, str)


def _loose_key(message: Message) -> bytes:
    return _key(message, canonical_arguments)


def _without_reasoning_key(message: Message) -> bytes:
    return _loose_key(replace(message, reasoning=""))


def _lacks_or_equals_reasoning(stored: Message, replayed: Message) -> bool:
    return replayed.reasoning in ("", stored.reasoning)


def _call_id_key(message: Message) -> bytes:
    if known_by_ids(message):
        return pack(("ids", *(call.id for call in message.tool_calls)))
    return _without_reasoning_key(replace(message, content=message.content.strip()))


def _call_id_accepts(stored: Message, replayed: Message) -> bool:
    return known_by_ids(stored) or replayed.reasoning.strip() in ("", stored.reasoning.strip())


def known_by_ids(message: Message) -> bool:
    """Whether every call id has the form that only this gateway issues: 96 random bits prove identity."""
    return bool(message.tool_calls) and all(ISSUED_ID.fullmatch(call.id) for call in message.tool_calls)


def says_nothing(message: Message) -> bool:
    """Whether it is an assistant message without content, reasoning and calls."""
    return message.role == "assistant" and not (
        message.content.strip() or message.reasoning.strip() or message.tool_calls
    )


def _role_content_key(message: Message) -> bytes:
    return pack((message.role, message.content))


MATCHERS = {
    matcher.name: matcher
    for matcher in (
        Matcher("strict", _strict_key),
        Matcher("loose_tool_call", _loose_key),
        Matcher("omit_reasoning", _without_reasoning_key, _lacks_or_equals_reasoning),
        Matcher("call_id", _call_id_key, _call_id_accepts, skips_empty=True),
        # Dangerous: turns that called different tools with the same text become one.
        Matcher("role_content_only", _role_content_key),
    )
}


def matcher(name: str) -> Matcher:
    """A built-in matcher, or the user's own at a dotted path. Raises `UserError` for anything else."""
    if name in MATCHERS:
        return MATCHERS[name]
    if "." not in name and ":" not in name:
        raise UserError(f"No matcher {name!r}: choose {', '.join(MATCHERS)} or a dotted path to your own.")
    found = load(name, "matcher")
    if not callable(getattr(found, "key", None)):
        raise UserError(f"matcher {name!r} has no function `key(message) -> bytes`.")
    return Matcher(name, found.key, getattr(found, "accepts", _always))
