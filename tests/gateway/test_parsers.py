"""Answers parsed while they arrive: any pieces, the same events and the same message."""

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.templates.models import CHATML, TAGS, byte_level
from tests.templates.strategies import arguments, texts
from titogym.gateway.sessions.matchers import ISSUED_ID
from titogym.gateway.tokens.parsers.answer import AnswerParser
from titogym.gateway.tokens.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from titogym.gateway.tokens.parsers.scan import JsonFence, StopStrings
from titogym.templates.conversation import Message, Prefix, ToolCall
from titogym.templates.families import QUICKSTART, QWEN3, SMOLLM2
from titogym.templates.literal import Guard
from titogym.templates.model import assemble
from titogym.templates.render import Renderer
from titogym.templates.tokenizer import Tokenizer

TOKENIZER = Tokenizer(byte_level(CHATML, TAGS))
FAMILIES = {family.name: family for family in (QUICKSTART, QWEN3, SMOLLM2)}
[STOP] = TOKENIZER.encode("<|im_end|>")

# What models write, whole and broken.
_words = '<think> </think> text é🎉 <tool_call> </tool_call> <tool </ < " } { \\ , [] END <|im_start|>'
fragments = st.sampled_from(
    [
        *_words.split(),
        *("\n", "\n\n", " ", "<tool_call>\n", "\n</tool_call>"),
        '{"name": 3}',
        '{"name": "bash", "arguments": ',
        '{"name": "bash", "arguments": {"command": "ls"}}',
        '{"arguments": {"b": 1}, "name": "x"}',
        '[{"name": "a", "arguments": {"x": [1, {}]}}, {"name": "b"}]',
        '{"a": "}{\\"</tool_call>"}',
    ]
)
outputs = st.lists(fragments, max_size=12).map("".join)


def parser(family: str = "qwen3", **options) -> AnswerParser:
    return AnswerParser(FAMILIES[family], TOKENIZER, stop_ids=frozenset({STOP}), **options)


def joined(events: list[Event]) -> list[tuple[Any, ...]]:
    """Events with neighbours of one kind as one, and ids by their order."""
    plain: list[tuple[Any, ...]] = []
    for event in events:
        match event:
            case CallStart(index, id, name):
                assert ISSUED_ID.fullmatch(id)
                plain.append(("call", index, name))
            case CallArguments(index, text):
                if plain[-1][:2] == ("arguments", index):
                    plain[-1] = ("arguments", index, plain[-1][2] + text)
                else:
                    plain.append(("arguments", index, text))
            case Content(text) | Reasoning(text):
                kind = type(event).__name__
                if plain and plain[-1][0] == kind:
                    plain[-1] = (kind, plain[-1][1] + text)
                else:
                    plain.append((kind, text))
            case _:
                raise AssertionError(event)
    return plain


def without_ids(message: Message) -> tuple[Any, ...]:
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.tool_calls]


def parse(
    text: str, family: str = "qwen3", cuts: Sequence[int] = (), **options
) -> tuple[list[tuple[Any, ...]], Message]:
    ids = TOKENIZER.encode(text)
    made = parser(family, **options)
    events: list[Event] = []
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    for start, end in pairwise(bounds):
        events += made.push(ids[start:end])
    events += made.finish()
    return joined(events), made.message()


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=80)
@given(
    text=outputs,
    cuts=st.lists(st.integers(0, 400), max_size=20),
    opened=st.booleans(),
    calls=st.booleans(),
    stops=st.sampled_from([(), ("END",), ("\n\n", "ext")]),
)
def test_any_pieces_give_the_same_events_and_message(family, text, cuts, opened, calls, stops):
    options = {"opened": opened and FAMILIES[family].reasoning is not None, "calls": calls, "stops": stops}
    whole_events, whole = parse(text, family, **options)
    events, message = parse(text, family, cuts, **options)
    assert events == whole_events
    assert without_ids(message) == without_ids(whole)
    every_events, every = parse(text, family, list(range(400)), **options)
    assert every_events == whole_events
    assert without_ids(every) == without_ids(whole)


@settings(max_examples=100)
@given(outputs)
def test_without_reasoning_and_tools_an_answer_is_its_text(text):
    assert parse(text, "quickstart", calls=False)[1] == Message("assistant", text)


@st.composite
def answers(draw, family):
    """Messages as the family's format can say them: layout at the edges of marks is not part of the text."""
    text = texts.map(lambda t: re.sub(r"</?(think|tool_call)>", "", t))
    calls = tuple(
        ToolCall("", draw(st.sampled_from(["bash", "lire_é"])), draw(arguments))
        for _ in range(draw(st.integers(0, 3)))
    )
    reasoning = draw(text).strip() if family.reasoning else ""
    content = draw(text).lstrip("\n")
    return Message("assistant", content, reasoning, calls)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@settings(max_examples=60)
@given(data=st.data(), cuts=st.lists(st.integers(0, 400), max_size=10))
def test_parsing_undoes_rendering(family, data, cuts, tmp_path_factory):
    message = data.draw(answers(family))
    guard = Guard((*TOKENIZER.special_texts, *family.control_texts))
    assets = assemble(tmp_path_factory.getbasetemp(), family, TOKENIZER, Renderer(family, guard))
    asked = [Message("user", "x")]
    head = assets.encode(asked, Prefix(), add_generation_prompt=True)
    ids = assets.encode([*asked, message], Prefix(), add_generation_prompt=False)
    assert ids[: len(head)] == head
    ids = ids[len(head) :]
    ids = ids[: ids.index(STOP) + 1]
    made = parser(family.name)
    for start, end in pairwise(sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})):
        made.push(ids[start:end])
    made.finish()
    parsed = made.message()
    if family.tool_calls.kind == "hermes_json" or not message.tool_calls:
        assert without_ids(parsed) == without_ids(message)
    else:  # arguments are written anew, with the same value
        assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == [
            (c.name, json.loads(c.arguments)) for c in message.tool_calls
        ]
        assert (parsed.content, parsed.reasoning) == (message.content, message.reasoning)


CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (CALL, "", "", [("bash", '{"command": "ls"}')]),
        (f"hi\n{CALL}\n{CALL}", "hi", "", [("bash", '{"command": "ls"}')] * 2),
        (f"<think>\nhm\n</think>\n\nhi\n{CALL}", "hi", "hm", [("bash", '{"command": "ls"}')]),
        (f"{CALL}\nafter", "\nafter", "", [("bash", '{"command": "ls"}')]),
        ("<think>\nnever ends", "", "never ends", []),
        ("late <think>no</think>", "late <think>no</think>", "", []),
        # the end mark inside a string is text, also when the call goes on
        (
            '<tool_call>{"name": "w", "arguments": {"t": "a</tool_call>\\"b"}}</tool_call>',
            "",
            "",
            [("w", '{"t": "a</tool_call>\\"b"}')],
        ),
        # arguments that are no JSON: the harness answers that better than we can
        ('<tool_call>{"name": "b", "arguments": {"c": "ls"}\n</tool_call>', "", "", [("b", '{"c": "ls"')]),
        ('<tool_call>{"name": "b", "arguments": {"c": ls}}</tool_call>', "", "", [("b", '{"c": ls}')]),
        ('<tool_call>{"name": "b", "arguments": "ls"}</tool_call>', "", "", [("b", '"ls"')]),
        # a missing quote does not swallow the calls behind it
        (
            f'<tool_call>\n{{"name": "b", "arguments": {{"c": "ls}}}}\n</tool_call>\n{CALL}',
            "",
            "",
            [("b", '{"c": "ls}'), ("bash", '{"command": "ls"}')],
        ),
        # cut in mid-call
        ('<tool_call>{"name": "b", "arguments": {"c": "l', "", "", [("b", '{"c": "l')]),
        ('<tool_call>{"name": "b", "arguments": {"c": 1}}', "", "", [("b", '{"c": 1}')]),
        ('<tool_call>{"name": "b", "arg', '<tool_call>{"name": "b", "arg', "", []),
        # other ways to write a call
        ('<tool_call>{"arguments": {"c": 1}, "name": "b"}</tool_call>', "", "", [("b", '{"c": 1}')]),
        ('<tool_call>{"name": "b", "parameters": {"c": 1}}</tool_call>', "", "", [("b", '{"c": 1}')]),
        ('<tool_call>{"name": "b"}</tool_call>', "", "", [("b", "{}")]),
        # no calls: content, word for word
        ("x\n<tool_call>ls</tool_call>y", "x\n<tool_call>ls</tool_call>y", "", []),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', '<tool_call>{"name": "", "arguments": {}}</tool_call>', "", []),  # noqa: E501
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "", []),  # noqa: E501
        ("<tool_call></tool_call>", "<tool_call></tool_call>", "", []),
        ("<tool_call>[[[", "<tool_call>[[[", "", []),
        ("</tool_call>", "</tool_call>", "", []),
    ],
)  # fmt: skip
def test_hermes_calls(text, content, reasoning, calls):
    assert without_ids(parse(text)[1]) == (content, reasoning, calls)


def test_arguments_flow_while_they_are_sampled():
    made = parser()
    ids = TOKENIZER.encode(CALL)
    seen = [event for token in ids for event in made.push([token])]
    assert sum(isinstance(event, CallArguments) for event in seen) > 5
    first = next(i for i, event in enumerate(seen) if isinstance(event, CallStart))
    assert all(isinstance(event, CallArguments) for event in seen[first + 1 :])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>[{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]</tool_call>', "", [("a", '{"x": 1}'), ("b", "{}")]),  # noqa: E501
        ('I will.\n<tool_call>[{"name": "a", "arguments": {"x": "</tool_call>"}}]</tool_call>', "I will.", [("a", '{"x": "</tool_call>"}')]),  # noqa: E501
        ('<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>', "", [("a", '{"x": 1}')]),
        ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
        ('<tool_call>[{"name": "a"}, {"nam": "b"}]</tool_call>', '<tool_call>[{"name": "a"}, {"nam": "b"}]</tool_call>', []),  # noqa: E501
        ('<tool_call>[{"name": "a", "argum', '<tool_call>[{"name": "a", "argum', []),
    ],
)  # fmt: skip
def test_json_list_calls(text, content, calls):
    assert without_ids(parse(text, "smollm2")[1]) == (content, "", calls)


def test_control_tokens_in_mid_answer_stay_text_and_the_stop_token_goes():
    made = parser("quickstart")
    ids = TOKENIZER.encode("a<|im_end|>b<|im_end|>")
    made.push(ids[:2])
    made.push(ids[2:])
    made.finish()
    assert made.message().content == "a<|im_end|>b"


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from(["a", "b", "ab", "ba", "\n", "abb"]), max_size=10),
    st.sampled_from([("ab",), ("bb", "a\n"), ("abba", "bb"), ("ab", "b")]),
)
def test_text_ends_where_the_first_complete_stop_string_begins(pieces, stops):
    text = "".join(pieces)
    scanner = StopStrings(stops)
    seen = "".join(map(scanner.push, pieces)) + scanner.flush()
    # Character by character, as the engine that stops at the first one.
    for end in range(1, len(text) + 1):
        complete = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            assert seen == text[: min(complete)]
            return
    assert seen == text


@settings(max_examples=150)
@given(
    objects=st.recursive(texts | st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=5),
    rest=texts,
)
@example(objects="</tool_call>", rest="")
def test_fence_is_never_fooled_by_valid_json(objects, rest):
    block = json.dumps(objects, ensure_ascii=False)
    for size in (1, 3, 1000):
        fence = JsonFence("</tool_call>")
        pieces = [
            f"{block}</tool_call>{rest}"[i : i + size] for i in range(0, len(block) + 12 + len(rest), size)
        ]
        inside = ""
        for i, piece in enumerate(pieces):
            text, after = fence.push(piece)
            inside += text
            if after is not None:
                assert after + "".join(pieces[i + 1 :]) == rest
                break
        else:
            raise AssertionError("no end")
        assert inside == block


def test_long_answers_take_linear_time():
    """200 kB token by token: with any rescanning of what came before this would take minutes."""
    body = json.dumps({"text": "x" * 100_000})
    text = f'<think>{"y" * 100_000}</think><tool_call>{{"name": "w", "arguments": {body}}}</tool_call>'
    made = parser()
    for token in TOKENIZER.encode(text):
        made.push([token])
    made.finish()
    assert made.message().tool_calls[0].arguments == body
