"""Which replays count as the stored message, for each matcher."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.templates.strategies import assistants, texts
from titogym.errors import UserError
from titogym.gateway.sessions.matchers import MATCHERS, Matcher, canonical_arguments, matcher
from titogym.gateway.tokens.parsers.tool_calls import new_call_id
from titogym.templates.conversation import Message, ToolCall

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(texts, values, max_size=3)


def same(rule: Matcher, stored: Message, replayed: Message) -> bool:
    return rule.key(stored) == rule.key(replayed) and rule.accepts(stored, replayed)


def reordered(value):
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return [reordered(item) for item in value] if isinstance(value, list) else value


def call(arguments: str, id: str = "call_1", name: str = "bash") -> Message:
    return Message("assistant", tool_calls=(ToolCall(id, name, arguments),))


@pytest.mark.parametrize("rule", MATCHERS.values(), ids=lambda rule: rule.name)
@settings(max_examples=30)
@given(message=assistants())
def test_every_matcher_takes_an_exact_replay(rule, message):
    assert same(rule, message, message)


@settings(max_examples=60)
@given(a=assistants(), b=assistants())
def test_strict_takes_nothing_else(a, b):
    assert same(MATCHERS["strict"], a, b) == (a == b)


@settings(max_examples=80)
@given(value=objects)
def test_loose_tool_call_takes_every_serialisation_of_the_same_arguments(value):
    rule = MATCHERS["loose_tool_call"]
    stored = call(json.dumps(value))
    for replay in (
        json.dumps(reordered(value), ensure_ascii=False),
        json.dumps(value, indent=3),
        json.dumps(value, separators=(",", ":"), sort_keys=True),
    ):
        assert same(rule, stored, call(replay))
    if stored != call(json.dumps(value, indent=3)):
        assert not same(MATCHERS["strict"], stored, call(json.dumps(value, indent=3)))


@settings(max_examples=80)
@given(a=objects, b=objects)
def test_loose_tool_call_takes_no_other_value(a, b):
    """Python's `==` takes True for 1; JSON does not, so compare with the types written out."""

    def typed(value):
        if isinstance(value, dict):
            return {key: typed(item) for key, item in value.items()}
        if isinstance(value, list):
            return [typed(item) for item in value]
        return (
            "bool" if isinstance(value, bool) else "number" if isinstance(value, int | float) else "other",
            value,
        )

    took = same(MATCHERS["loose_tool_call"], call(json.dumps(a)), call(json.dumps(b)))
    assert took == (typed(a) == typed(b))


@pytest.mark.parametrize(
    ("stored", "replayed", "equal"),
    [
        ("", "{}", True),
        ("  ", "{ }", True),
        ('{"n": 1}', '{"n": 1.0}', True),  # JavaScript writes 1.0 as 1
        ('{"n": 1}', '{"n": "1"}', False),
        ('{"n": 1}', '{"n": "1.0"}', False),
        ('{"n": 1}', '{"n": true}', False),
        ('{"n": 0}', '{"n": false}', False),
        ('{"n": null}', "{}", False),
        ('{"s": "caf\\u00e9 \\/tmp"}', '{"s": "café /tmp"}', True),
        ('{"s": "\\ud800"}', '{"s":"\\ud800"}', True),
        ("{broken", "{broken", True),
        ("{broken", "{broken ", False),
        ("NaN", '"NaN"', False),
        ("[" * 100_000, "[" * 100_000, True),
    ],
)
def test_canonical_arguments(stored, replayed, equal):
    assert (canonical_arguments(stored) == canonical_arguments(replayed)) is equal


@settings(max_examples=60)
@given(message=assistants(), other=texts)
def test_omit_reasoning_takes_a_replay_without_reasoning_but_not_with_another(message, other):
    rule = MATCHERS["omit_reasoning"]
    assert same(rule, message, replace(message, reasoning=""))
    assert same(rule, message, replace(message, reasoning=other)) == (other in ("", message.reasoning))
    if message.reasoning:
        assert not same(MATCHERS["loose_tool_call"], message, replace(message, reasoning=""))


def issued(message: Message) -> Message:
    return replace(message, tool_calls=tuple(replace(c, id=new_call_id()) for c in message.tool_calls))


@settings(max_examples=60)
@given(message=assistants().filter(lambda m: m.tool_calls).map(issued), rewritten=assistants(), text=texts)
def test_call_id_knows_a_call_by_its_ids_whatever_became_of_the_rest(message, rewritten, text):
    rule = MATCHERS["call_id"]
    calls = tuple(ToolCall(c.id, "invalid", text) for c in message.tool_calls)
    assert same(rule, message, replace(rewritten, tool_calls=calls))
    assert not same(rule, message, issued(message))  # other ids
    assert not same(rule, message, replace(message, tool_calls=()))


@settings(max_examples=60)
@given(message=assistants(calls=0), edge=st.sampled_from(["", " ", "\n", "\n\n ", "\t"]))
def test_call_id_ignores_edge_white_space_where_there_are_no_calls(message, edge):
    rule = MATCHERS["call_id"]
    assert same(rule, message, replace(message, content=edge + message.content.strip() + edge, reasoning=""))
    assert not same(rule, message, replace(message, content=message.content + "!"))


def test_call_id_trusts_only_ids_of_our_own():
    theirs = call('{"a": 1}', id="functions.bash:1")
    assert same(MATCHERS["call_id"], theirs, call('{ "a": 1 }', id="functions.bash:1"))
    assert not same(MATCHERS["call_id"], theirs, call('{"a": 2}', id="functions.bash:1"))


def test_role_content_only_merges_turns_that_called_different_tools():
    assert same(MATCHERS["role_content_only"], call('{"a": 1}'), call('{"b": 2}', name="rm"))
    assert not same(MATCHERS["role_content_only"], Message("user", "x"), Message("tool", "x"))


@pytest.mark.parametrize("rule", MATCHERS.values(), ids=lambda rule: rule.name)
def test_no_matcher_confuses_where_one_field_ends_and_the_next_begins(rule):
    a = Message("assistant", "ab", "c")
    b = Message("assistant", "a", "bc")
    assert not same(rule, a, b)


class ByLength:
    """A user's own matcher, for `test_own_matcher_by_dotted_path`."""

    @staticmethod
    def key(message: Message) -> bytes:
        return str(len(message.content)).encode()


def test_own_matcher_by_dotted_path():
    rule = matcher("tests.gateway.test_matchers:ByLength")
    assert same(rule, Message("user", "abc"), Message("user", "xyz"))
    assert not same(rule, Message("user", "abc"), Message("user", "ab"))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("exact", "choose strict"),
        ("tests.gateway.test_matchers:Nothing", "has no 'Nothing'"),
        ("no_such_package:x", "cannot be imported"),
        ("tests.gateway.test_matchers:texts", "no function `key"),
    ],
)
def test_unknown_matchers_are_refused(name, told):
    with pytest.raises(UserError, match=told):
        matcher(name)
