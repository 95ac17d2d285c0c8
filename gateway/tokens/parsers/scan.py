"""Finding markers in text that arrives in pieces."""

import re
from collections.abc import Sequence


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` begins with, short of the whole marker."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


class StopStrings:
    """Passes text on up to the stop string that is complete first, holding back what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> str:
        if not self._stops:
            return text
        if self._stopped:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = len(text) - max(overlap(text, stop) for stop in self._stops)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


_STRING_END = re.compile(r'["\\\x00-\x1f]')


class JsonFence:
    """Finds the end marker of a block of JSON, without being fooled by the marker inside a string.

    A string with a raw control character in it is broken: from there on strings are no longer
    tracked, so that one missing quote does not swallow the rest of the answer.
    """

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._quote_or_marker = re.compile('"|' + re.escape(marker))
        self._held = ""
        self._in_string = False
        self._broken = False

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is known to be inside the block, and the text after the marker once it came."""
        text, self._held = self._held + text, ""
        at = 0
        while True:
            if self._in_string:
                found = _STRING_END.search(text, at)
                if found is None:
                    return text, None
                if found[0] == "\\":
                    if found.end() == len(text):
                        self._held = "\\"
                        return text[:-1], None
                    at = found.end() + 1
                    continue
                self._in_string = False
                self._broken = found[0] != '"'
                # A broken string may end in the marker's own first character.
                at = found.start() if self._broken else found.end()
                continue
            if self._broken:
                end = text.find(self._marker, at)
            else:
                found = self._quote_or_marker.search(text, at)
                if found and found[0] == '"':
                    self._in_string = True
                    at = found.end()
                    continue
                end = found.start() if found else -1
            if end >= 0:
                return text[:end], text[end + len(self._marker) :]
            keep = len(text) - overlap(text[at:], self._marker)
            self._held = text[keep:]
            return text[:keep], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held
