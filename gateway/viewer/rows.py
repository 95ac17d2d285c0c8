"""A row in the parts that its turns added, and any stretch of it token by token.

Parts are cheap however long the row is: the tokens of a stretch are looked up only when it is shown.
"""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titogym.gateway.sessions.tree import Node, path
from titogym.templates.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4  # bytes


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens `[start, end)` of a row, all sampled by the model in `node`'s turn or all put there for it."""

    node: Node
    sampled: bool
    start: int
    end: int


def parts(leaf: Node) -> list[Part]:
    """The whole row up to the end of `leaf`'s answer."""
    found: list[Part] = []
    at = 0
    for node in path(leaf):
        generation = node.generation
        at -= generation.trim
        while found and found[-1].end > at:
            last = found.pop()
            if last.start < at:
                found.append(replace(last, end=at))
        for sampled, ids in ((False, generation.prompt_ids), (True, generation.output_ids)):
            if ids:
                found.append(Part(node, sampled, at, at + len(ids)))
                at += len(ids)
    return found


def trained_in(leaves: Iterable[Node]) -> dict[int, int]:
    """Node -> the leaf in whose trajectory its answer carries loss: the earliest of `leaves` below it."""
    owners: dict[int, int] = {}
    for leaf in sorted(leaves, key=lambda node: node.id):
        node: Node | None = leaf
        while node is not None and node.id not in owners:
            owners[node.id] = leaf.id
            node = node.parent
    return owners


def stretch(
    tokenizer: Tokenizer, row: Sequence[Part], owners: Mapping[int, int], leaf: int, start: int, end: int
) -> dict[str, Any]:
    """Tokens `[start, end)` of a row as parallel lists.

    `loss` is 1 where the token carries loss in `leaf`'s trajectory; `logprobs` is None for what the model
    did not sample; `versions` are `[start, end, weight version]` over row positions. The text of a token
    that ends within a character is "", and the whole character stands at the token that completes it.
    """
    ids: list[int] = []
    loss: list[int] = []
    logprobs: list[float | None] = []
    versions: list[tuple[int, int, str]] = []
    lead: list[int] = []  # the tokens before `start` in which its character may begin
    for part in row:
        if part.end <= start - _LONGEST_CHARACTER or part.start >= end:
            continue
        generation = part.node.generation
        held = generation.output_ids if part.sampled else generation.prompt_ids
        first, last = max(start - part.start, 0), min(end, part.end) - part.start
        lead += held[max(start - _LONGEST_CHARACTER - part.start, 0) : min(first, part.end - part.start)]
        if first >= last:
            continue
        ids += held[first:last]
        trained = part.sampled and owners.get(part.node.id) == leaf
        loss += [int(trained)] * (last - first)
        logprobs += generation.logprobs[first:last] if part.sampled else [None] * (last - first)
        if part.sampled:
            versions += [
                (part.start + max(span.start, first), part.start + min(span.end, last), span.version)
                for span in generation.spans
                if span.start < last and span.end > first
            ]
    return {
        "start": start,
        "ids": ids,
        "texts": _texts(tokenizer, lead, ids),
        "loss": loss,
        "logprobs": logprobs,
        "versions": versions,
    }


def _texts(tokenizer: Tokenizer, lead: Sequence[int], ids: Sequence[int]) -> list[str]:
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    for token in lead:
        utf8.decode(tokenizer.token_bytes(token))
    return [utf8.decode(tokenizer.token_bytes(token)) for token in ids]
