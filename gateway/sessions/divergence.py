"""Why a harness lost its place: which field of a request differs from the conversation that it continues.

A request that brings answers which the session does not hold starts a new root, or branches off early,
and the model is trained on less than it sampled. The reason is nearly always one field that the harness
rewrites: a date in the system prompt, the description of a tool, trimmed text.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titogym.gateway.sessions.matchers import Matcher
from titogym.gateway.sessions.tree import Node, Tree, conversation
from titogym.templates.conversation import Message, Prefix

_LOOK_BACK = 8  # a harness goes on from one of its latest turns
_ENDS = 16  # messages at each end by which conversations are known: what is between would take too long
_EXCERPT = 60  # characters
_BARE = str.maketrans("", "", " ()")
_HABIT = 2  # lost places from which on a harness is said to lose it every time


@dataclass(frozen=True, slots=True)
class Divergence:
    """`node` is the turn that lost its place; it seems to continue `after`, but for `field`."""

    node: int
    after: int
    field: str
    held: str  # what the session has there
    sent: str


def report(tree: Tree) -> dict[str, Any]:
    """Every lost place of a session, with the fields that caused them, and a sentence where it is a habit."""
    found = divergences(tree)
    causes = Counter(_generic(divergence.field) for divergence in found)
    verdict = None
    if causes:
        field, count = causes.most_common(1)[0]
        if count >= _HABIT:
            verdict = (
                f"The harness changes {field} of what it had sent: {count} turns lost their history by it."
            )
    plain = [
        {"node": d.node, "after": d.after, "field": d.field, "held": d.held, "sent": d.sent} for d in found
    ]
    return {"causes": causes, "verdict": verdict, "turns": plain}


def divergences(tree: Tree) -> list[Divergence]:
    found = []
    for node in tree.nodes:
        if any(message.role == "assistant" for message in node.messages):  # history that it could not use
            divergence = _divergence(tree, node)
            if divergence is not None:
                found.append(divergence)
    return found


def first_difference(
    matcher: Matcher, node: Node, prefix: Prefix, messages: Sequence[Message]
) -> tuple[str, str, str] | None:
    """Where a request first differs from `node`'s conversation: the field, what is held, what was sent.

    None where it repeats the whole conversation.
    """
    if node.prefix != prefix:
        return _prefix_difference(node.prefix, prefix)
    held = conversation(node)
    for i, (ours, theirs) in enumerate(zip(held, messages, strict=False)):
        if ours == theirs:
            continue  # a key takes far longer to make
        if matcher.key(ours) != matcher.key(theirs) or not matcher.accepts(ours, theirs):
            return _message_difference(i, ours, theirs)
    if len(messages) < len(held):
        return f"messages[{len(messages)}]", held[len(messages)].role, "nothing"
    return None


def _divergence(tree: Tree, node: Node) -> Divergence | None:
    messages = conversation(node)[:-1]
    earlier = [n for n in tree.nodes[max(0, node.id - _LOOK_BACK) : node.id] if n.depth <= len(messages)]
    best: tuple[int, Node] | None = None
    for candidate in earlier:
        alike = _alike(tree.matcher, conversation(candidate), messages)
        if best is None or alike >= best[0]:
            best = alike, candidate
    if best is None or best[0] == 0:
        return None  # it continues nothing that the session knows
    found = first_difference(tree.matcher, best[1], node.prefix, messages)
    return None if found is None else Divergence(node.id, best[1].id, *found)


def _alike(matcher: Matcher, held: Sequence[Message], sent: Sequence[Message]) -> int:
    """How many messages stand in the same place of both, of the first and the last that may."""
    size = min(len(held), len(sent))
    places = [*range(min(_ENDS, size)), *range(max(_ENDS, size - _ENDS), size)]
    return sum(held[i] == sent[i] or matcher.key(held[i]) == matcher.key(sent[i]) for i in places)


def _prefix_difference(held: Prefix, sent: Prefix) -> tuple[str, str, str]:
    for name in sorted({*held.kwargs, *sent.kwargs}):
        if held.kwargs.get(name) != sent.kwargs.get(name):
            return f"template argument {name}", repr(held.kwargs.get(name)), repr(sent.kwargs.get(name))
    ours, theirs = ({tool["function"]["name"]: tool["function"] for tool in p.tools} for p in (held, sent))
    for name in {**ours, **theirs}:
        if name not in ours or name not in theirs:
            return (
                f"tools.{name}",
                "given" if name in ours else "absent",
                "given" if name in theirs else "absent",
            )
        for key in {**ours[name], **theirs[name]}:
            if ours[name].get(key) != theirs[name].get(key):
                was, now = _excerpts(str(ours[name].get(key)), str(theirs[name].get(key)))
                return f"tools.{name}.{key}", was, now
    return "tools", "another order", "another order"


def _message_difference(at: int, held: Message, sent: Message) -> tuple[str, str, str]:
    where = f"messages[{at}]"
    if held.role != sent.role:
        return f"{where}.role", held.role, sent.role
    where = f"{where} ({held.role})"
    for name in ("content", "reasoning", "tool_call_id", "name"):
        if getattr(held, name) != getattr(sent, name):
            return f"{where}.{name}", *_excerpts(getattr(held, name), getattr(sent, name))
    calls = [[f"{call.id} {call.name} {call.arguments}" for call in m.tool_calls] for m in (held, sent)]
    return f"{where}.tool_calls", *_excerpts(", ".join(calls[0]), ", ".join(calls[1]))


def _excerpts(held: str, sent: str) -> tuple[str, str]:
    """Both texts from shortly before the place where they part."""
    at = next(
        (i for i, (a, b) in enumerate(zip(held, sent, strict=False)) if a != b), min(len(held), len(sent))
    )
    start = max(0, at - _EXCERPT // 3)
    return held[start : start + _EXCERPT], sent[start : start + _EXCERPT]


def _generic(field: str) -> str:
    """The field without the number of its message: the same cause, wherever it strikes."""
    head, _, rest = field.partition("]")
    return rest.translate(_BARE) if head.startswith("messages[") and rest else field
