"""Control characters on a terminal: what a model or its tools wrote must not steer the reader's."""

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_PICTURES = 0x2400  # U+2400 to U+241F are pictures of the characters from 0 on


def visible(text: str) -> str:
    """`text` with pictures in place of its control characters, tabs and line feeds aside.

    Halves of surrogate pairs, which no terminal can be sent, are U+FFFD.
    """
    return _CONTROL.sub(_picture, text.replace("\r\n", "\n"))


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(_PICTURES + code) if code < 0x20 else "\N{SYMBOL FOR DELETE}" if code == 0x7F else "\ufffd"
