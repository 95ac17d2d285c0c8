"""The JSON of the rows that a session is likely to continue.

Engines take prompts as JSON, and to write a history of 64,000 tokens takes longer than everything else that
is done with it. So each row's text is made from its parent's.
"""

from collections import OrderedDict
from collections.abc import Sequence

from titogym.gateway.engines.base import Prompt, ids_json
from titogym.gateway.sessions.tree import Node, row

_LINEAGES = 4  # that a session may switch between without a row being written anew


class RowTexts:
    """Of one session: the JSON of its latest rows, one for each of its latest lineages."""

    def __init__(self) -> None:
        self._texts: OrderedDict[Node, bytes] = OrderedDict()

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(map(len, self._texts.values()))

    def prompt(self, parent: Node | None, trim: int, added: Sequence[int]) -> Prompt:
        """`parent`'s row without its last `trim` tokens, and behind it `added`."""
        ids = row(parent)
        text = b"" if parent is None else self._texts.get(parent) or ids_json(ids)
        if trim:
            del ids[-trim:]
            text = text.rsplit(b",", trim)[0] if ids else b""
        ids.extend(added)
        return Prompt(ids, b",".join(filter(None, (text, ids_json(added)))))

    def keep(self, node: Node, prompt: Prompt) -> None:
        """Keep the row of a node that was sampled behind `prompt`, in place of its parent's."""
        if node.parent is not None:
            self._texts.pop(node.parent, None)
        self._texts[node] = b",".join(filter(None, (prompt.json, ids_json(node.generation.output_ids))))
        if len(self._texts) > _LINEAGES:
            self._texts.popitem(last=False)
