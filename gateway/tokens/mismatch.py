"""`tito_session_mismatch`: where a session's exact row differs from a fresh rendering of its messages.

The row is the truth: it is what the engine saw and sampled. The rendering says what another tool would
make of the same messages. Both are cut at special tokens and compared piece by piece; each difference
has one of four types and a probable cause.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import accumulate, pairwise
from typing import Literal

from titogym.gateway.sessions.tree import Node, path, row
from titogym.templates.conversation import Message, Prefix
from titogym.templates.model import ModelAssets
from titogym.templates.render import RenderError
from titogym.templates.seam import seam

MismatchType = Literal["special_token_count", "special_token_type", "non_assistant_text", "assistant_text"]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One difference. `row_ids` and `rendered_ids` are the tokens that differ, `at` their place in the row.

    `message` is the index of the message that it falls in.
    """

    type: MismatchType
    message: int
    at: int
    row_ids: list[int]
    rendered_ids: list[int]
    row_text: str
    rendered_text: str
    cause: str


def compare(assets: ModelAssets, leaf: Node) -> list[Mismatch]:
    """Every difference between `leaf`'s row and the rendering of its conversation as the harness holds it."""
    nodes = path(leaf)
    conversation = [message for node in nodes for message in (*node.messages, _as_held(node))]
    try:
        rendered = assets.encode(conversation, leaf.prefix, add_generation_prompt=False)
    except RenderError as error:
        cause = f"template: it refuses the conversation: {error}"
        return [Mismatch("non_assistant_text", 0, 0, [], [], "", "", cause)]
    actual = closed_row(assets, leaf)
    if actual == rendered:
        return []
    return _Comparison(assets, nodes, conversation, actual, rendered).mismatches()


def _as_held(node: Node) -> Message:
    """The answer as the harness holds it. The model's own ids of its calls are not the harness's to hold."""
    if node.replayed is None:
        return node.answer
    native = {call.id: call.native_id for call in node.answer.tool_calls}
    calls = (replace(call, native_id=native.get(call.id, "")) for call in node.replayed.tool_calls)
    return replace(node.replayed, tool_calls=tuple(calls))


def closed_row(assets: ModelAssets, leaf: Node) -> list[int]:
    """The row with what the template writes behind its last answer."""
    sampled = leaf.generation.output_ids
    closer, openers = assets.closing(leaf.answer)
    joint = seam(sampled, closer, (), openers, len(sampled))
    tokens = row(leaf).tolist()
    return [*tokens[: len(tokens) - joint.trim], *joint.append]


class _Comparison:
    def __init__(
        self,
        assets: ModelAssets,
        nodes: list[Node],
        conversation: list[Message],
        actual: list[int],
        rendered: list[int],
    ) -> None:
        self._assets = assets
        self._conversation = conversation
        self._prefix = nodes[0].prefix
        self._actual = actual
        self._rendered = rendered
        self._answers = {node.depth - 1: node for node in nodes}
        self._control = assets.control_ids
        self._characters: list[int] | None = None  # where each rendered token ends in the text
        self._ends: list[int] | None = None  # where each message ends in the text

    def mismatches(self) -> list[Mismatch]:
        return [found for region in self._regions() if (found := self._mismatch(*region)) is not None]

    def _regions(self) -> Iterator[tuple[int, int, int, int]]:
        """Spans (start and end in the row, then in the rendering) that differ."""
        ours, theirs = _pieces(self._actual, self._control), _pieces(self._rendered, self._control)
        marks = [self._mark(self._actual, piece) for piece in ours]
        others = [self._mark(self._rendered, piece) for piece in theirs]
        a = r = 0
        for a0, r0, size in _blocks(marks, others):
            if a < a0 or r < r0:  # other marks here; the text ahead of them belongs to the difference
                start, other = max(a - 1, 0), max(r - 1, 0)
                yield ours[start][0], ours[a0 - 1][1], theirs[other][0], theirs[r0 - 1][1]
            follows = a0 + size < len(ours) or r0 + size < len(theirs)
            for mine, its in zip(
                ours[a0 : a0 + size - follows], theirs[r0 : r0 + size - follows], strict=True
            ):
                yield *mine, *its
            a, r = a0 + size, r0 + size

    def _mark(self, tokens: list[int], piece: tuple[int, int]) -> int:
        start, end = piece
        return tokens[start] if start < end and tokens[start] in self._control else -1

    def _mismatch(self, a0: int, a1: int, r0: int, r1: int) -> Mismatch | None:
        a, r = self._actual[a0:a1], self._rendered[r0:r1]
        if a == r:
            return None
        head = _shared(a, r)
        tail = _shared(a[head:][::-1], r[head:][::-1])
        a, r = a[head : len(a) - tail], r[head : len(r) - tail]
        message = self._message_at(r0 + head)
        kind = self._kind(a, r, message)
        ours, theirs = self._assets.tokenizer.decode(a), self._assets.tokenizer.decode(r)
        return Mismatch(
            kind, message, a0 + head, a, r, ours, theirs, self._cause(kind, message, ours == theirs)
        )

    def _kind(self, a: list[int], r: list[int], message: int) -> MismatchType:
        ours, theirs = ([token for token in side if token in self._control] for side in (a, r))
        if len(ours) != len(theirs):
            return "special_token_count"
        if ours != theirs:
            return "special_token_type"
        return "assistant_text" if self._conversation[message].role == "assistant" else "non_assistant_text"

    def _cause(self, kind: MismatchType, message: int, same_text: bool) -> str:
        node = self._answers.get(message)
        if node is None:
            if kind == "non_assistant_text" and same_text:
                return "seam: the tokenizer joins text across the seam"
            return "template: it is not append-only"
        if node.replayed is not None:
            return f"harness: it rewrote {', '.join(rewritten(node.answer, node.replayed))}"
        if kind != "assistant_text":
            return "model: it sampled control tokens inside its answer"
        if same_text:
            return "model: it sampled another tokenisation of the same text"
        if isinstance(node.generation.stop, str):
            return "stop string: it was sampled, and is no part of the message"
        return "parser: the message does not render back to what was sampled"

    def _message_at(self, token: int) -> int:
        """Index of the message that writes the rendering's token `token`."""
        if self._characters is None:
            decoder = self._assets.tokenizer.stream()
            lengths = (len(decoder.push([t])) for t in self._rendered)
            self._characters = list(accumulate(lengths))
        character = self._characters[min(token, len(self._characters)) - 1] if token else 0
        if self._ends is None:
            self._ends = self._turn_by_turn()
        last = len(self._conversation) - 1
        if self._ends:
            return min(bisect_right(self._ends, character), last)
        return min(bisect_right(range(1, last + 1), character, key=self._end), last)

    def _turn_by_turn(self) -> list[int]:
        """Where each message ends, every turn rendered behind a short conversation and not behind all.

        Empty where that does not add up to the whole rendering.
        """
        light = Prefix(kwargs=self._prefix.kwargs)  # tools stand ahead of all messages
        answers = sorted(self._answers)
        ends = [self._end(n + 1) for n in range(answers[0] + 1)]
        for before, answer in pairwise(answers):
            lead = [_QUESTION, self._conversation[before]]
            start = self._length(lead, light)
            for count in range(before + 1, answer + 1):
                behind = self._length([*lead, *self._conversation[before + 1 : count + 1]], light)
                ends.append(ends[before] + behind - start)
        return ends if ends[-1] == self._end(len(self._conversation)) else []

    def _end(self, count: int) -> int:
        return self._length(self._conversation[:count], self._prefix)

    def _length(self, messages: Sequence[Message], prefix: Prefix) -> int:
        """Characters of a rendering."""
        return len(self._assets.renderer.render(messages, prefix, add_generation_prompt=False))


_QUESTION = Message("user", "x")


def rewritten(stored: Message, replayed: Message) -> list[str]:
    """The fields in which a replayed answer differs from the sampled one."""
    names = [name for name in ("content", "reasoning") if getattr(stored, name) != getattr(replayed, name)]
    calls, sent = stored.tool_calls, replayed.tool_calls
    if len(calls) != len(sent):
        return [*names, "tool_calls"]
    parts = ("id", "name", "arguments")
    pairs = list(zip(calls, sent, strict=True))
    return names + [
        f"tool_calls.{part}" for part in parts if any(getattr(a, part) != getattr(b, part) for a, b in pairs)
    ]


def _pieces(tokens: Sequence[int], control: frozenset[int]) -> list[tuple[int, int]]:
    """Spans that each begin with a control token, and ahead of them one with what comes before, if empty."""
    marks = [0, *(i for i, token in enumerate(tokens) if token in control)]
    return list(zip(marks, [*marks[1:], len(tokens)], strict=True))


def _blocks(a: list[int], b: list[int]) -> list[tuple[int, int, int]]:
    """Matching runs of `a` and `b` as (start in `a`, start in `b`, length), with an empty one at the end."""
    head = _shared(a, b)
    tail = _shared(a[head:][::-1], b[head:][::-1])
    middle = SequenceMatcher(None, a[head : len(a) - tail], b[head : len(b) - tail], autojunk=False)
    blocks = [(0, 0, head)]
    blocks += [(head + i, head + j, size) for i, j, size in middle.get_matching_blocks()[:-1]]
    return [*blocks, (len(a) - tail, len(b) - tail, tail), (len(a), len(b), 0)]


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
