"""The seam: where a row of exact tokens meets freshly rendered messages.

A row ends with what the model sampled. The template would go on with the family's closer and the new
messages. Part of that may be sampled already (the stop token, as a rule), and a stop token may stand there
that the template would not write. `seam` keeps the first and drops the second; history is never rendered
again, so the cost of a turn follows its new tokens.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from titogym.templates.conversation import Message, Prefix
from titogym.templates.render import NotAppendOnlyError, Renderer
from titogym.templates.tokenizer import Tokenizer, encode_segments


@dataclass(frozen=True, slots=True)
class Seam:
    """Drop `trim` tokens from the row's end, then add `append` under loss mask 0."""

    trim: int
    append: list[int]


def seam(
    row_tail: Sequence[int],
    closer_ids: Sequence[int],
    suffix_ids: Sequence[int],
    openers: frozenset[int],
    sampled: int,
) -> Seam:
    """Join a row to `closer + suffix`.

    `row_tail` is the row or as much of its end as was sampled in its last turn, `sampled` how many of its
    last tokens the model sampled (prompt tokens are never taken for a closer). The longest part of
    `closer + suffix` that stands at the row's end already is kept there, with its log-probs and its loss,
    and the rest is appended: a turn cut by length gets its whole closer. A token of `openers` (stop tokens
    that are no part of the closer, `ModelAssets.opener_ids`) that the next message does not begin with is
    trimmed.
    """
    target = [*closer_ids, *suffix_ids]
    trim = 0
    while True:
        kept = _overlap(row_tail, len(row_tail) - trim, target, sampled - trim)
        if kept or trim >= sampled or row_tail[-1 - trim] not in openers:
            return Seam(trim, target[kept:])
        trim += 1


def _overlap(row: Sequence[int], end: int, target: Sequence[int], sampled: int) -> int:
    """Length of the longest head of `target` that `row[:end]` ends with, within its last `sampled` tokens."""
    for length in range(min(sampled, len(target)), 0, -1):
        if row[end - 1] == target[length - 1] and list(row[end - length : end]) == list(target[:length]):
            return length
    return 0


def suffix(
    renderer: Renderer,
    tokenizer: Tokenizer,
    new_messages: Sequence[Message],
    prefix: Prefix,
    *,
    neighbour: Message | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Ids that the template writes for `new_messages` behind a closed assistant message.

    They are rendered behind a dummy conversation, which is then taken off. `neighbour` is the real
    assistant message before them; it takes the dummy's place when the family folds the new messages into
    what stands before. Raises `RenderError` when the template refuses the messages, and
    `NotAppendOnlyError` when it rewrites what stands before them.
    """
    tail = _DUMMY_ANSWER
    if neighbour is not None and any(message.role in renderer.family.folds for message in new_messages):
        tail = neighbour
    before = [_DUMMY_QUESTION, tail]
    # The definitions of tools stand ahead of all messages; only whether there are any can matter here.
    light = Prefix(tools=(_DUMMY_TOOL,) if prefix.tools else (), kwargs=prefix.kwargs)
    key = renderer, tokenizer, bool(prefix.tools), json.dumps(prefix.kwargs)
    head = _dummy_head(*key) if tail is _DUMMY_ANSWER else _head(renderer, tokenizer, before, light)
    whole = encode_segments(
        tokenizer,
        renderer.render_segments(
            [*before, *new_messages], light, add_generation_prompt=add_generation_prompt
        ),
    )
    if whole[: len(head)] != head and tail is _DUMMY_ANSWER:
        _dummy_head.cache_clear()  # a template may write the date
        head = _dummy_head(*key)
    if whole[: len(head)] != head:
        roles = ", ".join(message.role for message in new_messages)
        raise NotAppendOnlyError(
            f"the {renderer.family.name} template rewrites the assistant message before: {roles or 'prompt'}",
            head,
            whole[: len(head)],
        )
    return whole[len(head) :]


@lru_cache(maxsize=256)
def _dummy_head(renderer: Renderer, tokenizer: Tokenizer, tools: bool, kwargs: str) -> list[int]:
    """The dummy conversation's ids, which are the same in every turn."""
    light = Prefix(tools=(_DUMMY_TOOL,) if tools else (), kwargs=json.loads(kwargs))
    return _head(renderer, tokenizer, [_DUMMY_QUESTION, _DUMMY_ANSWER], light)


def _head(renderer: Renderer, tokenizer: Tokenizer, before: Sequence[Message], prefix: Prefix) -> list[int]:
    pieces = renderer.render_segments(before, prefix, add_generation_prompt=False)
    return encode_segments(tokenizer, pieces)


_DUMMY_QUESTION = Message("user", "x")
_DUMMY_ANSWER = Message("assistant", "x")
_DUMMY_TOOL = {
    "type": "function",
    "function": {"name": "x", "parameters": {"type": "object", "properties": {}}},
}
