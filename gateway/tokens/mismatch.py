"""`tito_session_mismatch`: where a session's exact row differs from a fresh rendering of its messages.

The row is the truth: it is what the engine saw and sampled. The rendering says what another tool would
make of the same messages. Both are cut at special tokens and compared piece by piece; each difference
has one of four types and a probable cause.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate
from typing import Literal

from titogym.gateway.sessions.tree import Node, path, row
from titogym.templates.conversation import Message
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
    conversation = [message for node in nodes for message in (*node.messages, node.replayed or node.answer)]
    try:
        rendered = assets.encode(conversation, leaf.prefix, add_generation_prompt=False)
    except RenderError as error:
        return [Mismatch("non_assistant_text", 0, 0, [], [], "", "", f"the template refuses it: {error}")]
    actual = _closed(assets, leaf)
    if actual == rendered:
        return []
    return _Comparison(assets, nodes, conversation, actual, rendered).mismatches()


def _closed(assets: ModelAssets, leaf: Node) -> list[int]:
    """The row with what the template writes behind its last answer."""
    sampled = leaf.generation.output_ids
    joint = seam(sampled, assets.closer_ids, (), assets.opener_ids, len(sampled))
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
        self._control = assets.tokenizer.special_ids | assets.stop_ids
        self._characters: list[int] | None = None  # where each rendered token ends in the text
        self._ends: dict[int, int] = {}  # messages -> characters of their rendering

    def mismatches(self) -> list[Mismatch]:
        actual, rendered = _pieces(self._actual, self._control), _pieces(self._rendered, self._control)
        marks = [
            [tokens[start] if start >= 0 else -1 for start, _ in pieces]
            for tokens, pieces in ((self._actual, actual), (self._rendered, rendered))
        ]
        found: list[Mismatch] = []
        for tag, a0, a1, r0, r1 in SequenceMatcher(None, marks[0], marks[1], autojunk=False).get_opcodes():
            if tag == "equal":
                for ours, theirs in zip(actual[a0:a1], rendered[r0:r1], strict=True):
                    self._text(ours, theirs, found)
            elif a1 - a0 == r1 - r0:
                for ours, theirs in zip(actual[a0:a1], rendered[r0:r1], strict=True):
                    self._special(
                        "special_token_type",
                        (max(ours[0], 0), ours[1]),
                        (max(theirs[0], 0), theirs[1]),
                        found,
                    )
            else:
                ours = _span(actual, a0, a1, len(self._actual))
                theirs = _span(rendered, r0, r1, len(self._rendered))
                self._special("special_token_count", ours, theirs, found)
        return found

    def _text(self, ours: tuple[int, int], theirs: tuple[int, int], found: list[Mismatch]) -> None:
        """Compare the text of two pieces that begin with the same mark."""
        a, r = self._actual[ours[0] + 1 : ours[1]], self._rendered[theirs[0] + 1 : theirs[1]]
        if a == r:
            return
        head = _shared(a, r)
        tail = _shared(a[head:][::-1], r[head:][::-1])
        at, then = ours[0] + 1 + head, theirs[0] + 1 + head
        a, r = a[head : len(a) - tail], r[head : len(r) - tail]
        message = self._message_at(then)
        role = self._conversation[message].role
        kind: MismatchType = "assistant_text" if role == "assistant" else "non_assistant_text"
        found.append(self._mismatch(kind, message, at, a, r))

    def _special(
        self, kind: MismatchType, ours: tuple[int, int], theirs: tuple[int, int], found: list[Mismatch]
    ) -> None:
        a, r = self._actual[slice(*ours)], self._rendered[slice(*theirs)]
        found.append(self._mismatch(kind, self._message_at(theirs[0]), ours[0], a, r))

    def _mismatch(self, kind: MismatchType, message: int, at: int, a: list[int], r: list[int]) -> Mismatch:
        decode = self._assets.tokenizer.decode
        ours, theirs = decode(a), decode(r)
        return Mismatch(kind, message, at, a, r, ours, theirs, self._cause(kind, message, ours == theirs))

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
            lengths = (len(self._assets.tokenizer.decode([t])) for t in self._rendered)
            self._characters = list(accumulate(lengths))
        character = self._characters[min(token, len(self._characters)) - 1] if token else 0
        last = len(self._conversation) - 1
        return min(bisect_right(range(1, last + 1), character, key=self._end), last)

    def _end(self, count: int) -> int:
        """Characters of the first `count` messages' rendering."""
        if count not in self._ends:
            text = self._assets.renderer.render(
                self._conversation[:count], self._prefix, add_generation_prompt=False
            )
            self._ends[count] = len(text)
        return self._ends[count]


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
    """Spans that each begin with a control token; the first, (-1, n), holds what stands ahead of them all."""
    marks = [-1, *(i for i, token in enumerate(tokens) if token in control)]
    return list(zip(marks, [*marks[1:], len(tokens)], strict=True))


def _span(pieces: Sequence[tuple[int, int]], first: int, last: int, end: int) -> tuple[int, int]:
    start = pieces[first][0] if first < len(pieces) else end
    return max(start, 0), pieces[last - 1][1] if last > first else max(start, 0)


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
