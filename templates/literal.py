"""Text that people wrote never becomes a control token.

A user may type `<|im_end|>`. Written into a prompt as it is, the tokenizer would turn it into the token
that ends the turn. So every text that comes from a client (contents, tool arguments, tool definitions,
template arguments) passes a `Guard` before the template sees it: inside each occurrence of a control
token's text the guard puts a joint, and no token reaches across a joint. Text without such occurrences
passes unchanged, hence tokenizes together with the template's own text exactly as it always did.

Templates write the same joint (`{{ joint }}`) between the opener of an assistant message and what the model
wrote: sampled tokens never merge with the prompt, so a rendered assistant message must not merge either.
"""

import re
from collections.abc import Iterable
from typing import Any

# A lone surrogate: no text that can be written as UTF-8 holds one, so a client cannot forge a joint.
JOINT = "\udc00"
_SURROGATE = re.compile("[\ud800-\udfff]")


class Guard:
    """Breaks the texts of `control` tokens wherever they occur in what a client wrote."""

    def __init__(self, control: Iterable[str]) -> None:
        # A text of one character has no inside; no known tokenizer has such a control token.
        texts = sorted({text for text in control if len(text) > 1}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None

    def text(self, text: str) -> str:
        """`text` with a joint inside every control text, and U+FFFD for lone surrogates."""
        if not text.isascii():
            text = _SURROGATE.sub("\ufffd", text)
        # Again until none is left: occurrences may overlap, and one pass breaks only the first of them.
        while self._pattern is not None and self._pattern.search(text):
            text = self._pattern.sub(lambda match: match[0][0] + JOINT + match[0][1:], text)
        return text

    def value(self, value: Any) -> Any:
        """The same for every string inside a JSON value, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value


def segments(guarded: str) -> list[str]:
    """The pieces of a guarded text; no token may reach from one into the next."""
    return guarded.split(JOINT)
