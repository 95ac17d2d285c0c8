"""Telling which field a harness changes when it loses its place."""

from dataclasses import replace
from typing import Any

import openai
import pytest

from tests.gateway.forest import answer, tree, turn, user
from tests.gateway.test_turns import TOOLS, create, inspect, replay, sdk
from titogym.gateway.sessions.divergence import divergences, first_difference, report
from titogym.gateway.sessions.matchers import matcher
from titogym.gateway.sessions.tree import Tree
from titogym.templates.conversation import Message, Prefix, ToolCall

SYSTEM = Message("system", "You are an agent. It is 10:00.")
CALL = Message("assistant", "I look.", tool_calls=(ToolCall("c1", "bash", '{"a": 1}'),))
RESULT = Message("tool", "out", tool_call_id="c1")
BASH = {"type": "function", "function": {"name": "bash", "description": "Runs.", "parameters": {}}}
OTHER = {"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": {}}}


@pytest.mark.parametrize(
    ("prefix", "messages", "field", "held", "sent"),
    [
        (Prefix((BASH,)), [replace(SYSTEM, content="You are an agent. It is 10:01.")], "messages[0] (system).content", "an agent. It is 10:00.", "an agent. It is 10:01."),  # noqa: E501
        (Prefix((BASH,)), [SYSTEM, user("x")], "messages[1] (user).content", "hi", "x"),
        (Prefix((BASH,)), [SYSTEM, answer("x")], "messages[1].role", "user", "assistant"),
        (Prefix((BASH,)), [SYSTEM, user("hi"), replace(CALL, reasoning="hm")], "messages[2] (assistant).reasoning", "", "hm"),  # noqa: E501
        (Prefix((BASH,)), [SYSTEM, user("hi"), replace(CALL, tool_calls=())], "messages[2] (assistant).tool_calls", 'c1 bash {"a": 1}', ""),  # noqa: E501
        (Prefix((BASH,)), [SYSTEM], "messages[1]", "user", "nothing"),
        (Prefix((OTHER,)), [SYSTEM], "tools.bash.description", "Runs.", "Run."),
        (Prefix(), [SYSTEM], "tools.bash", "given", "absent"),
        (Prefix((BASH,), {"enable_thinking": False}), [SYSTEM], "template argument enable_thinking", "None", "False"),  # noqa: E501
    ],
)  # fmt: skip
def test_first_difference_is_named(prefix, messages, field, held, sent):
    forest = tree()
    node = turn(forest, [SYSTEM, user("hi")], CALL, prefix=Prefix((BASH,)))
    assert first_difference(forest.matcher, node, prefix, messages) == (field, held, sent)


def test_a_request_that_repeats_everything_differs_nowhere():
    forest = tree()
    node = turn(forest, [SYSTEM, user("hi")], CALL)
    assert first_difference(forest.matcher, node, Prefix(), [SYSTEM, user("hi"), CALL, RESULT]) is None


def test_a_harness_that_roots_again_every_turn_is_told_why():
    forest = tree()
    history: list[Message] = [user("hi")]
    for minute in range(4):
        system = replace(SYSTEM, content=f"It is 10:0{minute}.")
        node = turn(forest, [system, *history], replace(CALL, content=f"turn {minute}"), "branching")
        history += [node.answer, RESULT]
    told = report(forest)
    assert told["causes"] == {"system.content": 3}
    assert told["verdict"].startswith("The harness changes system.content")
    assert [(d.node, d.after) for d in divergences(forest)] == [(1, 0), (2, 1), (3, 2)]


def rooted_again(turns: int) -> tuple[int, int]:
    """Lost places that are found after so many turns that all rooted again, and messages looked at."""
    looked = 0
    strict = matcher("strict")

    def key(message: Message) -> bytes:
        nonlocal looked
        looked += 1
        return strict.key(message)

    forest = Tree(replace(strict, key=key))
    history: list[Message] = [user("hi")]
    for minute in range(turns):
        system = replace(SYSTEM, content=f"It is 10:{minute}.")
        node = turn(forest, [system, *history], replace(CALL, content=f"turn {minute}"), "branching")
        history += [node.answer, RESULT]
    looked = 0
    return len(divergences(forest)), looked


def test_what_a_report_takes_grows_with_the_turns_alone():
    (few, short), (many, long) = rooted_again(40), rooted_again(160)
    assert (few, many) == (39, 159)
    assert long < 5 * short


def test_other_conversations_and_lost_answers_are_no_divergence():
    forest = tree()
    turn(forest, [SYSTEM, user("hi")], CALL)
    turn(forest, [SYSTEM, user("hi"), CALL, RESULT], answer("done"))
    turn(forest, [Message("system", "Title, please."), user("hi")], answer("A title"), "branching")
    turn(forest, [SYSTEM, user("hi"), CALL, user("try again")], answer("ok"), "branching")
    assert divergences(forest) == []
    assert report(forest) == {"causes": {}, "verdict": None, "turns": []}


def test_the_session_reports_it_and_a_linear_session_refuses_by_name(serve):
    stand = serve(["one", "two", "three"])
    client_of = {policy: create(stand.url, policy=policy) for policy in ("branching", "linear")}
    for policy, session in client_of.items():
        client = sdk(session)
        first = client.chat.completions.create(
            model="m", messages=[{"role": "system", "content": "10:00"}, {"role": "user", "content": "hi"}]
        )
        later: list[Any] = [
            *({"role": "system", "content": "10:01"}, {"role": "user", "content": "hi"}),
            *(replay(first), {"role": "user", "content": "go on"}),
        ]
        if policy == "branching":
            client.chat.completions.create(model="m", messages=later, tools=[])
            told = inspect(stand.url, session)["diagnostics"]["divergence"]
            assert told["causes"] == {"system.content": 1}
            [lost] = told["turns"]
            assert (lost["held"], lost["sent"]) == ("10:00", "10:01")
        else:
            with pytest.raises(openai.ConflictError, match=r"messages\[0\] \(system\)\.content differs"):
                client.chat.completions.create(model="m", messages=later)
            later[0]["content"] = "10:00"
            with pytest.raises(openai.ConflictError, match=r"tools\.bash differs"):
                client.chat.completions.create(model="m", messages=later, tools=TOOLS)
