"""What a model wrote is shown, and steers no terminal."""

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from titogym.cli.control import visible
from titogym.cli.session import token_view
from titogym.cli.transcript import print_turns
from titogym.gateway.trajectories import Trajectory

STEERING = "a\x1b[2J\x1b]0;mine\x07b\rc\x9b31m\x7f"


@given(st.text())
def test_nothing_but_lines_and_tabs_moves_the_cursor(text: str) -> None:
    shown = visible(text)
    assert not any((ord(c) < 0x20 and c not in "\t\n") or 0x7F <= ord(c) < 0xA0 for c in shown)
    assert visible(shown) == shown


def test_text_stays_as_it_is() -> None:
    assert visible("é 👩‍👧\ttab\nline\r\nend") == "é 👩‍👧\ttab\nline\nend"
    assert visible("half a pair: \ud800") == "half a pair: \ufffd"
    assert visible(STEERING) == "a␛[2J␛]0;mine␇b␍c\ufffd31m␡"


@pytest.mark.parametrize("colours", [False, True])
def test_turns_and_tokens_are_shown_so(colours: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=colours)
    turn: dict[str, Any] = {"id": 0, "parent": None, "turn": 1, "superseded": False, "output_tokens": 1}
    turn |= {"seconds": 0.0, "finish": "stop", "messages": [{"role": "user", "content": STEERING}]}
    print_turns(console, [{**turn, "answer": {"role": "assistant", "content": STEERING}}])
    trajectory = Trajectory("s", "0", [1, 2], [0, 1], [0.0, -1.0], [], 1, "stop")
    console.print(token_view(trajectory, [STEERING] * 2, colours=colours))
    assert out.getvalue().count("␛[2J␛]0;mine␇b␍c") == 4
    assert not {"\x07", "\r", "\x9b"} & set(out.getvalue())


def test_sampled_tokens_stand_in_brackets_where_there_are_no_colours() -> None:
    trajectory = Trajectory("s", "0", [1] * 5, [0, 1, 1, 0, 1], [0.0, -1.0, -1.0, 0.0, -1.0], [], 2, "stop")
    assert token_view(trajectory, list("abcde"), colours=False).plain == "a⟦bc⟧d⟦e⟧"
    assert token_view(trajectory, list("abcde"), colours=True).plain == "abcde"
