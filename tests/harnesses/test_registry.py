"""Finding harnesses by name and by path."""

from typing import Any

import pytest

from titogym.errors import UserError
from titogym.harnesses.agent_program import AgentProgram
from titogym.harnesses.command import Command
from titogym.harnesses.openai_loop import OpenAILoop
from titogym.harnesses.registry import harness, names


def test_built_in_harnesses_are_made_with_their_options() -> None:
    loop = harness("openai_loop", system="Hi.")
    assert isinstance(loop, OpenAILoop)
    assert loop.system == "Hi."
    assert isinstance(harness("command", command="x"), Command)
    assert isinstance(harness("mini_swe_agent"), AgentProgram)


@pytest.mark.parametrize("name", names())
def test_a_harness_calls_itself_what_it_is_called(name: str) -> None:
    made = harness(name, **({"command": "x"} if name == "command" else {}))
    assert made.name == name


def test_a_dotted_path_finds_any_harness() -> None:
    made = harness("titogym.harnesses.command:Command", command="x")
    assert isinstance(made, Command)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("nobody", {}, "openai_loop"),
        ("no.such.module:Agent", {}, "no.such"),
        ("titogym.harnesses.command:Nothing", {}, "Nothing"),
        ("openai_loop", {"sytem": ""}, "it takes system"),
        ("command", {}, "it takes command"),
        ("..harness", {}, "not a dotted path"),
        ("command", {"command": True}, "command = True"),
        ("command", {"command": ["x", 1]}, "should be a valid string"),
        ("command", {"command": "x", "mount": ["/"]}, "mount"),
        ("openai_loop", {"system": 5}, "system = 5"),
        ("openai_loop", {"request": 5}, "request = 5"),
        ("openai_loop", {"retries": "often"}, "retries = 'often'"),
        ("openai_loop", {"command_seconds": -1}, "greater than 0"),
        ("openai_loop", {"max_tokens": 0}, "max_tokens = 0"),
        ("mini_swe_agent", {"overrides": "x"}, "overrides"),
    ],
)
def test_what_cannot_be_made_is_refused(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        harness(name, **options)
