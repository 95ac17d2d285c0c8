import pytest
from hypothesis import given
from hypothesis import strategies as st

from titogym.templates.literal import JOINT, Guard, segments

CONTROL = ("<|im_end|>", "<|im_start|>", "abab", "bc", "<|", "[/INST]")
pieces = st.lists(st.sampled_from([*CONTROL, "ab", "a", "b", "c", "<", "|", "x", "\n", "é", "🎉"])).map(
    "".join
)


@given(pieces)
def test_no_control_text_survives_and_no_character_is_lost(text):
    guarded = Guard(CONTROL).text(text)
    assert not any(control in guarded for control in CONTROL)
    assert "".join(segments(guarded)) == text


@given(st.text())
def test_text_without_control_text_passes_unchanged(text):
    if not any(control in text for control in CONTROL):
        assert Guard(CONTROL).text(text) == text


def test_a_forged_joint_becomes_a_replacement_character():
    assert Guard(CONTROL).text(f"<{JOINT}|im_end|>\ud83d") == f"<\ufffd{'|im_end|>'}\ufffd"


def test_json_values_are_guarded_everywhere():
    guarded = Guard(["<e>"]).value({"<e>": ["<e>", 1, None, {"k": ("a<e>",)}]})
    assert guarded == {f"<{JOINT}e>": [f"<{JOINT}e>", 1, None, {"k": [f"a<{JOINT}e>"]}]}


@pytest.mark.parametrize("control", [(), ("x",), ("",)])
def test_nothing_to_guard(control):
    assert Guard(control).text("x<|im_end|>") == "x<|im_end|>"
