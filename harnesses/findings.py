"""What `tito_session_mismatch` found in an episode's session, short enough to be kept with it."""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

MOST_FINDINGS = 20  # of one episode
_TOKENS = 16  # of one side of a finding
_CHARACTERS = 200  # of its text
_TOLD_TOKENS = 8  # in a line for a person
_TOLD_CHARACTERS = 60


class Finding(TypedDict):
    """One difference between a trajectory's row and the rendering of its messages; plain JSON.

    It is in the trajectory to turn `leaf`, at its token `at`, in the message numbered `message`. Of each side
    the first token ids and characters are kept; `row_total` and `rendered_total` count all its tokens.
    """

    type: str
    cause: str
    leaf: str
    message: int
    role: str
    at: int
    row_ids: list[int]
    rendered_ids: list[int]
    row_total: int
    rendered_total: int
    row_text: str
    rendered_text: str


def findings(report: Mapping[str, Any], most: int = MOST_FINDINGS) -> list[Finding]:
    """Those in a gateway's report of a session: at most `most`, of each type and cause one before another."""
    found = report["diagnostics"]["mismatches"]
    firsts: dict[tuple[str, str], int] = {}
    for number, item in enumerate(found):
        firsts.setdefault((item["type"], item["cause"]), number)
    chosen = dict.fromkeys([*firsts.values(), *range(len(found))])
    return [_short(found[number]) for number in sorted(list(chosen)[:most])]


def _short(item: Mapping[str, Any]) -> Finding:
    return {
        "type": item["type"],
        "cause": _cut(item["cause"], _CHARACTERS),
        "leaf": item["leaf"],
        "message": item["message"],
        "role": item["role"],
        "at": item["at"],
        "row_ids": item["row_ids"][:_TOKENS],
        "rendered_ids": item["rendered_ids"][:_TOKENS],
        "row_total": len(item["row_ids"]),
        "rendered_total": len(item["rendered_ids"]),
        "row_text": _cut(item["row_text"], _CHARACTERS),
        "rendered_text": _cut(item["rendered_text"], _CHARACTERS),
    }


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def described(finding: Finding) -> str:
    """Type, place and cause in one line."""
    place = f"message {finding['message']} ({finding['role']}), token {finding['at']}"
    return f"{finding['type']} in {place}; {finding['cause']}"


def side(finding: Finding, of: Literal["row", "rendered"]) -> str:
    """The text that stands there and its token ids: different tokens may be the same text."""
    ids, total, text = (
        (finding["row_ids"], finding["row_total"], finding["row_text"])
        if of == "row"
        else (finding["rendered_ids"], finding["rendered_total"], finding["rendered_text"])
    )
    if not total:
        return "nothing"
    told = " ".join(map(str, ids[:_TOLD_TOKENS]))
    more = f" … {total} tokens" if total > _TOLD_TOKENS else ""
    return f"{_cut(text, _TOLD_CHARACTERS)!r} [{told}{more}]"


def compared(finding: Finding) -> str:
    """Both sides in one line."""
    return f"row {side(finding, 'row')}, rendered again {side(finding, 'rendered')}"
