import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titogym.envs import rewards
from titogym.envs.task import GradingError


@given(st.floats(0, 1))
def test_a_reward_comes_back_from_both_formats(reward):
    assert rewards.from_text(f" {reward!r}\n".encode(), "reward.txt") == reward
    assert rewards.from_json(json.dumps({"reward": reward, "speed": 3}).encode(), "reward.json") == (
        reward,
        {"reward": reward, "speed": 3},
    )
    assert rewards.from_json(json.dumps(reward).encode(), "reward.json") == (reward, {})
    assert rewards.from_json(json.dumps({"pass_rate": reward}).encode(), "reward.json")[0] == reward


@settings(max_examples=300)
@given(
    st.one_of(
        st.binary(max_size=20), st.text(max_size=20).map(str.encode), st.floats().map(repr).map(str.encode)
    )
)
def test_anything_else_is_an_error_and_never_a_number(content):
    for read in (rewards.from_text, lambda *arguments: rewards.from_json(*arguments)[0]):
        try:
            reward = read(content, "the file")
        except GradingError:
            continue
        assert isinstance(reward, float)
        assert math.isfinite(reward)
        assert 0 <= reward <= 1


@pytest.mark.parametrize("text", ["", "nan", "inf", "-inf", "1.5", "-0.1", "yes", "1 0", "1e309"])
def test_doubtful_texts(text):
    with pytest.raises(GradingError, match=r"reward\.txt"):
        rewards.from_text(text.encode(), "reward.txt")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NaN",
        "Infinity",
        "1e309",
        "true",
        '"1"',
        "null",
        "[1]",
        "{}",
        '{"reward": "1"}',
        '{"reward": true}',
        '{"reward": 1, "other": NaN}',
        '{"speed": 1, "size": 1}',
        '{"reward": 1.01}',
        "1" * 400,
        '{"reward": ' + "1" * 400 + "}",
        "[" * 100_000,
    ],
)
def test_doubtful_json(text):
    with pytest.raises(GradingError):
        rewards.from_json(text.encode(), "reward.json")


def test_a_metric_may_be_any_whole_number():
    assert rewards.from_json(b'{"reward": 1, "bytes": ' + b"9" * 400 + b"}", "reward.json")[0] == 1


@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.text(max_size=3), st.lists).map(
        lambda v: json.dumps({"results": v}).encode()
    )
)
@settings(max_examples=60)
def test_no_report_of_tests_is_an_error(content):
    assert "error" in rewards.test_report(content)
