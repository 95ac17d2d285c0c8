from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titogym.envs.environment import Action, ToolCall
from titogym.envs.tools import Toolbox


async def add(a: int, b: int = 2, way: Literal["up", "down"] = "up") -> str:
    """Add two
    numbers."""
    if a > 100:
        raise ValueError("too large")
    return f"{a + b} {way}"


async def broken() -> str:
    raise RuntimeError("its own fault")


BOX = Toolbox(add, broken)


def test_a_tool_is_described_by_its_signature():
    tool = BOX.tools[0]
    assert (tool.name, tool.description) == ("add", "Add two numbers.")
    assert tool.parameters["required"] == ["a"]
    assert tool.parameters["properties"]["a"] == {"type": "integer"}
    assert tool.parameters["properties"]["way"]["enum"] == ["up", "down"]
    assert tool.as_function()["function"]["name"] == "add"


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("add", '{"a": 1}', "3 up"),
        ("add", '{"a": 1, "b": 5, "way": "down"}', "6 down"),
        ("add", "{}", "error: the argument 'a' is missing"),
        ("add", "", "error: the argument 'a' is missing"),
        ("add", '{"a": "x"}', "error: the argument 'a' is wrong"),
        ("add", '{"a": 1, "way": "left"}', "error: the argument 'way' is wrong"),
        ("add", '{"a": 1, "c": 2}', "error: there is no argument 'c', only a, b, way"),
        ("add", '{"a": 101}', "error: too large"),
        ("add", "[1]", "error: the arguments must be JSON like"),
        ("add", '{"a": ', "error: the arguments must be JSON like"),
        ("add", "[" * 100_000, "error: the arguments must be JSON like"),
        ("sub", "{}", "error: there is no tool 'sub', only add, broken"),
    ],
)
async def test_what_a_call_is_answered(name, arguments, text):
    (message,) = await BOX.answer(Action(tool_calls=(ToolCall("id-1", name, arguments),)))
    assert (message["role"], message["tool_call_id"]) == ("tool", "id-1")
    assert message["content"].startswith(text)


@given(st.text() | st.recursive(st.none() | st.integers(), st.lists).map(str))
async def test_no_arguments_of_the_model_are_a_fault_of_the_environment(arguments):
    await BOX.answer(Action(tool_calls=(ToolCall("1", "add", arguments),)))


async def test_a_fault_of_the_tool_passes():
    with pytest.raises(RuntimeError, match="its own fault"):
        await BOX.answer(Action(tool_calls=(ToolCall("1", "broken", "{}"),)))
