"""A session's append-only forest of generations.

A node stores only what its turn added, so memory grows with new tokens and never with turns times
prefix. Rows are put together from root to node when they are asked for.
"""

import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import orjson

from titogym.gateway.engines.base import VersionSpan
from titogym.gateway.sessions.matchers import Matcher, says_nothing
from titogym.templates.conversation import Message, Prefix, ToolCall


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds: until the engine was asked, until its first tokens came, and the whole turn."""

    queued: float = 0.0
    first_token: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Generation:
    """What one turn adds to its parent's row, with how it came about.

    The row of the turn is `parent's row[: -trim] + prompt_ids + output_ids`. `logprobs` has one entry
    per output id; `spans` count from the first output id.
    """

    trim: int
    prompt_ids: "array[int]"  # environment tokens: seam repair, new messages, assistant opener
    output_ids: "array[int]"
    logprobs: "array[float]"
    spans: tuple[VersionSpan, ...]
    finish: str  # "stop" or "length"
    stop: str | int | None = None  # the stop string or stop token that ended it
    engine: str = ""
    cached_tokens: int = 0
    # Of the tokens from `routes.first_missing` on; `RouteShape.row` bytes each
    routes: bytes | None = None
    unpaired: int = 0  # output tokens whose log-probs come from another pass than their routes: no loss
    timings: Timings = Timings()


@dataclass(frozen=True, slots=True)
class Receipt:
    """How a turn went over the wire.

    `id` is the answer's, as the client knows it; `created` is in seconds since the epoch; `request` is a
    digest of what was asked and `key` the client's idempotency key, "" where there is none; `echo` is
    what the protocol needs to write the answer once more.
    """

    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    request: str = ""
    key: str = ""
    echo: Mapping[str, Any] = field(default_factory=dict)


def token_array(ids: Iterable[int]) -> "array[int]":
    return array("i", ids)


def logprob_array(logprobs: Iterable[float]) -> "array[float]":
    """32-bit floats, which is what engines compute log-probs in."""
    return array("f", logprobs)


@dataclass(slots=True, eq=False)
class Node:
    """One committed generation: the messages that its request added, and the answer."""

    id: int  # order of commit within the session
    parent: "Node | None"
    prefix: Prefix  # the root's
    messages: tuple[Message, ...]
    answer: Message
    generation: Generation
    supersedes: int | None  # the turn that this one was sampled again in place of
    hashes: list[bytes]  # of everything before its own messages, and up to each of them and its answer
    depth: int  # messages up to and including the answer
    turn: int  # generations from the root, this one included
    length: int  # tokens of the row
    receipt: Receipt = field(default_factory=Receipt)
    children: int = 0
    replayed: Message | None = None  # how the harness last sent the answer back, where it changed it

    @property
    def request_hash(self) -> bytes:
        """Of everything up to the answer."""
        return self.hashes[-2]

    @property
    def end_hash(self) -> bytes:
        """Of everything up to and including the answer."""
        return self.hashes[-1]

    @property
    def size(self) -> int:
        """Bytes in memory, about."""
        generation = self.generation
        texts = sum(
            len(message.content)
            + len(message.reasoning)
            + sum(len(call.arguments) for call in message.tool_calls)
            for message in (*self.messages, self.answer)
        )
        ids = 4 * len(generation.prompt_ids) + 8 * len(generation.output_ids)
        hashes = _HASH_BYTES * len(self.hashes)
        return _NODE_BYTES + texts + ids + hashes + len(generation.routes or b"")


_NODE_BYTES = 2000  # of a node's objects, whatever they hold
_HASH_BYTES = 57
_LATEST = 4  # turns with which a request is compared: as many agents may take turns in a session


@dataclass(frozen=True, slots=True)
class Lookup:
    """Where a request falls in the forest.

    `nodes` are the deepest nodes whose conversation the request repeats, in order of commit (several
    where the model gave one answer twice); all lie `depth` messages deep. `hashes[i]` stands for the
    request's prefix and its first `i` messages. `messages` are those of the request that count.
    """

    prefix: Prefix
    messages: tuple[Message, ...]
    hashes: list[bytes]
    nodes: tuple[Node, ...]

    @property
    def depth(self) -> int:
        return self.nodes[0].depth if self.nodes else 0

    @property
    def turn(self) -> int:
        """Generations that the request repeats."""
        return self.nodes[0].turn if self.nodes else 0


@dataclass(slots=True)
class Tree:
    """The forest. `matcher` says which replayed messages count as the stored ones.

    `answers` finds the node of an answer by the id that the client was told, `calls` a sampled call by its.
    """

    matcher: Matcher
    nodes: list[Node] = field(default_factory=list)
    superseded: set[int] = field(default_factory=set)
    answers: dict[str, Node] = field(default_factory=dict)
    calls: dict[str, ToolCall] = field(default_factory=dict)
    size: int = 0  # bytes, about
    _ends: dict[bytes, list[Node]] = field(default_factory=dict)
    _requests: dict[bytes, list[Node]] = field(default_factory=dict)

    def find(self, prefix: Prefix, messages: Sequence[Message]) -> Lookup:
        """The deepest nodes that the request repeats: O(messages), whatever the size of the forest.

        Where leaving out its empty messages lets it repeat more (and the matcher allows it), the result
        is that of the request without them.
        """
        found = self._find(prefix, messages)
        if self.matcher.skips_empty:
            kept = [message for message in messages if not says_nothing(message)]
            if len(kept) < len(messages):
                other = self._find(prefix, kept)
                return other if other.turn > found.turn else found
        return found

    def _find(self, prefix: Prefix, messages: Sequence[Message]) -> Lookup:
        hashes = self._hashes(prefix, messages)
        held: set[int] = set()
        deepest: list[Node] = []
        for depth in range(1, len(messages) + 1):
            found = [
                node for node in self._ends.get(hashes[depth], ()) if self._repeats(node, messages, held)
            ]
            if found:
                held.update(node.id for node in found)
                deepest = found
        return Lookup(prefix, tuple(messages), hashes, tuple(deepest))

    def _hashes(self, prefix: Prefix, messages: Sequence[Message]) -> list[bytes]:
        """The chain over the request. What it repeats word for word of a latest turn is not hashed again."""
        known = [_prefix_hash(prefix)]
        for node in self.nodes[: -_LATEST - 1 : -1]:
            nodes = path(node)
            if nodes[0].hashes[0] == known[0]:
                known = max(known, _shared(nodes, messages), key=len)
            if len(known) > node.depth:
                break  # it repeats this turn as a whole
        return known + chain(known[-1], messages[len(known) - 1 :], self.matcher.key)[1:]

    def _repeats(self, node: Node, messages: Sequence[Message], held: set[int]) -> bool:
        """Whether the request's messages are acceptable as the node's own, its ancestors being `held`."""
        start = 0
        if node.parent is not None:
            if node.parent.id not in held:
                return False
            start = node.parent.depth
        own = (*node.messages, node.answer)
        return all(map(self.matcher.accepts, own, messages[start : node.depth]))

    def answered(self, request_hash: bytes) -> Sequence[Node]:
        """The nodes that answer one and the same request, in order of commit."""
        return self._requests.get(request_hash, ())

    def draft(
        self,
        parent: Node | None,
        prefix: Prefix,
        messages: tuple[Message, ...],
        answer: Message,
        generation: Generation,
        supersedes: int | None = None,
        receipt: Receipt | None = None,
    ) -> Node:
        """The node that a generation under `parent` (None: a new root) would be; changes nothing."""
        start = parent.end_hash if parent else _prefix_hash(prefix)
        hashes = chain(start, (*messages, answer), self.matcher.key)
        added = len(generation.prompt_ids) + len(generation.output_ids)
        return Node(
            id=len(self.nodes),
            parent=parent,
            prefix=parent.prefix if parent else prefix,
            messages=messages,
            answer=answer,
            generation=generation,
            supersedes=supersedes,
            hashes=hashes,
            depth=(parent.depth if parent else 0) + len(messages) + 1,
            turn=(parent.turn if parent else 0) + 1,
            length=(parent.length if parent else 0) - generation.trim + added,
            receipt=receipt or Receipt(),
        )

    def append(self, node: Node) -> None:
        """Commit a drafted node. Nothing may have been committed since it was drafted."""
        assert node.id == len(self.nodes)
        if node.parent:
            node.parent.children += 1
        if node.supersedes is not None:
            self.superseded.add(node.supersedes)
        self.nodes.append(node)
        self.size += node.size
        if node.receipt.id:
            self.answers[node.receipt.id] = node
        self.calls.update((call.id, call) for call in node.answer.tool_calls)
        self._ends.setdefault(node.end_hash, []).append(node)
        self._requests.setdefault(node.request_hash, []).append(node)

    def leaves(self) -> list[Node]:
        return [node for node in self.nodes if not node.children]

    def sampled_tokens(self) -> int:
        """Tokens that the model sampled, turns that were sampled again counted once."""
        return sum(len(n.generation.output_ids) for n in self.nodes if self.counts(n))

    def turns(self) -> int:
        return sum(map(self.counts, self.nodes))

    def counts(self, node: Node) -> bool:
        """Whether a node is part of what happened, and not a turn that was sampled again in its place."""
        return node.children > 0 or node.id not in self.superseded


def path(node: Node | None) -> list[Node]:
    """From the root to `node`."""
    nodes = []
    while node is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def _shared(nodes: Sequence[Node], messages: Sequence[Message]) -> list[bytes]:
    """The hashes of the messages, from the first, that equal those of a path of nodes."""
    hashes = nodes[0].hashes[:1]
    for node in nodes:
        for own, hash in zip((*node.messages, node.answer), node.hashes[1:], strict=True):
            if len(hashes) > len(messages) or messages[len(hashes) - 1] != own:
                return hashes
            hashes.append(hash)
    return hashes


def row(node: Node | None) -> "array[int]":
    """The full token sequence from the root to the end of `node`'s answer."""
    tokens = token_array(())
    for step in path(node):
        generation = step.generation
        if generation.trim:
            del tokens[-generation.trim :]
        tokens.extend(generation.prompt_ids)
        tokens.extend(generation.output_ids)
    return tokens


def conversation(node: Node | None) -> list[Message]:
    """All messages up to and including `node`'s answer, as the session holds them."""
    return [message for step in path(node) for message in (*step.messages, step.answer)]


def chain(start: bytes, messages: Iterable[Message], key: Callable[[Message], bytes]) -> list[bytes]:
    """`start` and the hash after each message: equal hashes mean equal prefix and equal keys so far."""
    hashes = [start]
    for message in messages:
        hashes.append(blake2b(key(message), digest_size=16, key=hashes[-1]).digest())
    return hashes


def _prefix_hash(prefix: Prefix) -> bytes:
    """Other tools or template arguments make another root. The order of keys in a tool does not."""
    written = orjson.dumps([prefix.tools, prefix.kwargs], option=orjson.OPT_SORT_KEYS)
    return blake2b(written, digest_size=16).digest()
