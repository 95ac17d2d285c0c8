"""Where a request may attach to a session's tree: small pure functions, so a refusal changes nothing."""

from collections.abc import Callable
from dataclasses import dataclass

from titogym.errors import UserError
from titogym.gateway.errors import RequestError
from titogym.gateway.sessions.divergence import first_difference
from titogym.gateway.sessions.tree import Lookup, Node, Tree


@dataclass(frozen=True, slots=True)
class Placement:
    """The node that a request extends (None: a new root), and the turn it is sampled again in place of."""

    parent: Node | None
    supersedes: Node | None = None


Policy = Callable[[Tree, Lookup], Placement]


def linear(tree: Tree, request: Lookup) -> Placement:
    """One line of turns: extend the tail, or sample the latest turn again (one generation rolled back).

    The tail is the latest commit. A request that continues an earlier attempt at the latest turn brings
    that attempt back in the tail's place. Raises `RequestError` for anything that diverges earlier.
    """
    if not tree.nodes:
        return Placement(None)
    tail = tree.nodes[-1]
    if tail in request.nodes:
        return Placement(tail)
    if not _rewrites_answer(tail, request):
        if tail.parent is None:
            if _repeats_request(tail, request) and not request.nodes:
                return Placement(None, supersedes=tail)
        elif tail.parent in request.nodes:
            return Placement(tail.parent, supersedes=tail)
    for attempt in reversed(request.nodes):
        if attempt.parent is tail.parent and not attempt.children:
            return Placement(attempt, supersedes=tail)
    difference = first_difference(tree.matcher, tail, request.prefix, request.messages)
    where = f" after {request.depth} of {tail.depth} messages"
    if difference is not None:
        field = difference[0]
        where = f": {field} {'is missing' if field == f'messages[{len(request.messages)}]' else 'differs'}"
    raise RequestError(
        f"This request leaves the session's conversation{where}. "
        "A linear session can be continued, or its latest turn tried again; start another session, or "
        "create this one with policy 'branching', to go back further.",
        status=409,
        code="conversation_diverged",
        param="messages",
    )


def _repeats_request(root: Node, request: Lookup) -> bool:
    """Whether the request begins with all that was asked in `root`: the first turn sent once more."""
    asked = len(root.messages)
    return len(request.messages) >= asked and request.hashes[asked] == root.request_hash


def _rewrites_answer(tail: Node, request: Lookup) -> bool:
    """Whether the request goes on behind an answer in the tail's place that the tail does not match.

    That is no retry: the harness had the answer and sends it back as another one, by this matcher. Taken
    for a retry, it would put every turn but the last out of training without a word.
    """
    behind = tail.depth - 1  # where the answer stands if the request asks what the tail was asked
    if len(request.messages) < behind or request.hashes[behind] != tail.request_hash:
        behind = tail.parent.depth if tail.parent else 0
    return any(message.role == "assistant" for message in request.messages[behind:])


def branching(tree: Tree, request: Lookup) -> Placement:
    """Every request is served at its deepest match; the same request again supersedes its last answer."""
    parent = request.nodes[-1] if request.nodes else None
    again = [n for n in tree.answered(request.hashes[-1]) if n.parent is parent and not n.children]
    return Placement(parent, supersedes=again[-1] if again else None)


POLICIES: dict[str, Policy] = {"linear": linear, "branching": branching}


def policy(name: str) -> Policy:
    if name not in POLICIES:
        raise UserError(f"No session policy {name!r}: choose {' or '.join(POLICIES)}.")
    return POLICIES[name]
