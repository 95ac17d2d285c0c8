"""The parsers of every family's calls: any pieces, one message; rendering undone; broken calls as text."""

import json
import os
import re
import subprocess
from dataclasses import astuple
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.test_parsers import joined, without_ids
from tests.templates.models import tokenizer_for
from tests.templates.strategies import arguments, texts
from titogym.gateway import engines
from titogym.gateway.engines.environment import engine_python
from titogym.gateway.tokens.parsers.answer import AnswerParser
from titogym.templates.conversation import Message, Prefix, ToolCall
from titogym.templates.families import BUILT_IN
from titogym.templates.literal import Guard
from titogym.templates.model import ModelAssets, assemble
from titogym.templates.render import Renderer
from titogym.templates.tokenizer import Tokenizer

FAMILIES = {family.name: family for family in BUILT_IN}
# One family of each format; the others share theirs.
FORMATS = (
    *(
        "qwen3-coder",
        "qwen3.5",
        "nemotron-3",
        "glm-4.5",
        "glm-4.7",
        "kimi-k2",
        "kimi-k2.5",
        "minimax-m2",
        "deepseek-v3",
    ),
    *("deepseek-v3.1", "deepseek-v3.2", "gpt-oss", "llama-3", "mistral", "qwen3-thinking"),
)


def tool(**properties):
    return {"type": "function", "function": {"name": "bash", "parameters": {"properties": properties}}}


TOOLS = (
    tool(
        command={"type": "string"},
        n={"type": "integer"},
        on={"type": "boolean"},
        items={"type": "array"},
        maybe={"anyOf": [{"type": "string"}, {"type": "null"}]},
        size={"type": ["number", "null"]},
        mode={"enum": ["fast", "slow"]},
    ),
)


@cache
def assets(name: str) -> ModelAssets:
    family = FAMILIES[name]
    tokenizer = Tokenizer(tokenizer_for(family))
    renderer = Renderer(family, Guard((*tokenizer.special_texts, *family.control_texts)))
    return assemble(Path(), family, tokenizer, renderer)


def parse(name: str, text: str, cuts: list[int] | None = None, **options):
    """Events and message of an answer, in one piece or cut at the tokens `cuts`."""
    made = AnswerParser(
        FAMILIES[name], assets(name).tokenizer, stop_ids=assets(name).stop_ids, tools=TOOLS, **options
    )
    ids = assets(name).tokenizer.encode(text)
    events = []
    for start, end in pairwise(sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts or ())})):
        events += made.push(ids[start:end])
    return joined(events + made.finish()), made.message()


def marks_of(name: str) -> list[str]:
    form, reasoning = FAMILIES[name].tool_calls, FAMILIES[name].reasoning
    assert form is not None
    parts = [] if form.marks is None else [str(part) for part in astuple(form.marks)]
    harmony = [
        "<|message|>",
        "<|end|>",
        "<|start|>assistant",
        "<|channel|>final",
        " to=functions.bash",
        "<|call|>",
    ]
    return [
        *filter(None, [form.begin, form.end, *parts]),
        *((reasoning.begin, reasoning.end) if reasoning else ()),
        *(harmony if form.kind == "harmony" else ()),
    ]


def outputs(name: str):
    marks = marks_of(name)
    pieces = [
        "text",
        "é🎉",
        "\n",
        "\n\n",
        " ",
        "bash",
        "command",
        "n",
        "3",
        "true",
        "{",
        "}",
        '"',
        "\\",
        "<",
        ";",
    ]
    calls = [
        '{"command": "ls"}',
        '{"name": "bash", "parameters": {"a": 1}}',
        "functions.bash:0",
        '" string="true',
    ]
    halves = [half for mark in marks for half in (mark[: len(mark) // 2], mark[len(mark) // 2 :])]
    rendered = [well_formed(name)]
    return st.lists(st.sampled_from([*marks, *marks, *pieces, *calls, *halves, *rendered]), max_size=14).map(
        "".join
    )


def well_formed(name: str) -> str:
    """An answer with two calls, as the family's template writes it."""
    calls = tuple(ToolCall(f"c{n}", "bash", '{"command": "echo \\"hé\\"\\n", "n": 2}') for n in range(2))
    prefix = Prefix()
    renderer = assets(name).renderer
    asked = [Message("user", "x")]
    head = renderer.render(asked, prefix, add_generation_prompt=True)
    text = renderer.render(
        [*asked, Message("assistant", "Hi.", "", calls)], prefix, add_generation_prompt=False
    )
    return text.removeprefix(head).removesuffix(FAMILIES[name].call_closer or FAMILIES[name].closer)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60)
@given(data=st.data(), cuts=st.lists(st.integers(0, 400), max_size=12), calls=st.booleans())
def test_any_pieces_give_the_same_events_and_message(name, data, cuts, calls):
    text = data.draw(outputs(name))
    opened = data.draw(st.booleans()) and FAMILIES[name].reasoning is not None
    whole_events, whole = parse(name, text, opened=opened, calls=calls)
    for pieces in (cuts, list(range(600))):
        events, message = parse(name, text, pieces, opened=opened, calls=calls)
        assert events == whole_events
        assert without_ids(message) == without_ids(whole)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40)
@given(data=st.data(), cuts=st.lists(st.integers(0, 400), max_size=8))
def test_parsing_undoes_rendering(name, data, cuts):
    family, made = FAMILIES[name], assets(name)
    assert family.tool_calls is not None
    marks = re.compile(
        "|".join(re.escape(mark.strip()) for mark in marks_of(name) if len(mark.strip()) > 1) + "|[<>]"
    )
    text = texts.map(lambda t: re.sub(r"^[\s{]+", "", marks.sub("", t)).strip())
    plain = arguments.map(lambda t: marks.sub("", t))
    calls = tuple(
        ToolCall(f"c{n}", data.draw(st.sampled_from(["bash", "lire_é"])), data.draw(plain))
        for n in range(data.draw(st.integers(0, 3)))
    )
    message = Message("assistant", data.draw(text), data.draw(text) if family.reasoning else "", calls)
    prefix = Prefix(kwargs={"thinking": True} if "thinking" in family.kwargs else {})
    asked = [Message("user", "x")]
    head = made.encode(asked, prefix, add_generation_prompt=True)
    ids = made.encode([*asked, message], prefix, add_generation_prompt=False)
    closer, _ = made.closing(message)
    ids = [*ids[len(head) : len(ids) - len(closer)], min(made.stop_ids)]
    # What the calls are typed by: every argument that is a string is declared one.
    tools = [
        {
            "function": {
                "name": call.name,
                "parameters": {
                    "properties": {
                        key: {"type": "string"}
                        for key, value in json.loads(call.arguments).items()
                        if isinstance(value, str)
                    }
                },
            }
        }
        for call in calls
    ]
    if len({call.name for call in calls}) < len(calls):
        tools = []  # two calls of one tool may disagree about a type
    parser = AnswerParser(
        family,
        made.tokenizer,
        stop_ids=made.stop_ids,
        opened=family.reasoning is not None and family.reasoning.open_after(made.renderer.opener(prefix)),
        tools=tools,
    )
    for start, end in pairwise(sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})):
        parser.push(ids[start:end])
    parser.finish()
    parsed = parser.message()
    assert (parsed.content, parsed.reasoning) == (message.content, message.reasoning)
    assert [call.name for call in parsed.tool_calls] == [call.name for call in calls]
    if tools or family.tool_calls.kind != "markup":
        assert [json.loads(call.arguments) for call in parsed.tool_calls] == [
            json.loads(c.arguments) for c in calls
        ]
    if family.tool_calls.ids:
        written = [f"functions.{call.name}:{n}" for n, call in enumerate(calls)]
        assert [call.native_id for call in parsed.tool_calls] == written


@pytest.mark.parametrize(
    ("argument", "text", "expected"),
    [
        ("command", "3", "3"),
        ("command", "true", "true"),
        ("command", "null", "null"),
        ("command", '{"a": 1}', '{"a": 1}'),
        ("command", "", ""),
        ("command", 'a\n "b" \\ <é🎉>\n', 'a\n "b" \\ <é🎉>\n'),
        ("n", "3", 3),
        ("n", " 3 ", 3),
        ("n", "three", "three"),
        ("n", "NaN", "NaN"),
        ("n", "None", None),
        ("on", "True", True),
        ("on", "false", False),
        ("items", '["a", 1]', ["a", 1]),
        ("items", "['a']", "['a']"),
        ("maybe", "null", None),
        ("maybe", "3", "3"),
        ("size", "2.50", 2.5),
        ("size", "null", None),
        ("mode", "fast", "fast"),
        ("unknown", "3", 3),
        ("unknown", "plain words", "plain words"),
    ],
)
def test_values_take_the_type_that_the_tool_declares(argument, text, expected):
    for name in ("qwen3.5", "nemotron-3"):
        block = f"<function=bash>\n<parameter={argument}>\n{text}\n</parameter>\n</function>"
        (call,) = parse(name, f"<tool_call>\n{block}\n</tool_call>", list(range(400)))[1].tool_calls
        found = json.loads(call.arguments)
        assert found == {argument: expected}
        assert type(found[argument]) is type(expected)


BAD = "no call"
GOOD = [("bash", {"command": "ls"})]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        # marked-up arguments
        ("qwen3.5", "Hi.\n\n<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>", "Hi.", GOOD),  # noqa: E501
        ("qwen3.5", "<tool_call>\n<function=bash>\n</function>\n</tool_call>", "", [("bash", {})]),
        ("qwen3.5", "<tool_call>\nls\n</tool_call>", BAD, []),
        ("qwen3.5", "<tool_call>\n<function=>\n</function>\n</tool_call>x", BAD, []),
        ("qwen3.5", "<tool_call>\n<function=ba", BAD, []),
        ("qwen3.5", '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>', BAD, []),
        # an argument that is not ended ends with its call
        ("qwen3.5", "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</tool_call>", "", GOOD),
        ("qwen3.5", "<tool_call>\n<function=bash>\n<parameter=command>\nl", "", [("bash", '{"command": "l')]),
        ("glm-4.5", "x\n<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>\n<tool_call>bash\n</tool_call>", "x", [*GOOD, ("bash", {})]),  # noqa: E501
        ("glm-4.5", "<tool_call>\n<arg_key>command</arg_key></tool_call>", BAD, []),
        ("glm-4.7", "x<tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call>", "x", GOOD),  # noqa: E501
        ("glm-4.7", "<tool_call>bash<arg_key>n</arg_key><arg_value>4", "", [("bash", '{"n": 4')]),
        ("minimax-m2", '<minimax:tool_call>\n<invoke name="bash">\n<parameter name="command">ls</parameter>\n</invoke>\n<invoke name="bash">\n</invoke>\n</minimax:tool_call>', "", [*GOOD, ("bash", {})]),  # noqa: E501
        ("minimax-m2", "<minimax:tool_call>\n</minimax:tool_call>", BAD, []),
        ("deepseek-v3.2", 'x\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="bash">\n<｜DSML｜parameter name="command" string="true">ls</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', "x", GOOD),  # noqa: E501
        ("deepseek-v3.2", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="bash">\n<｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>', "", [("bash", {"a": "1", "b": 1})]),  # noqa: E501
        # JSON between marks
        ("kimi-k2", 'x<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{"command": "ls"}<|tool_call_end|><|tool_calls_section_end|>', "x", GOOD),  # noqa: E501
        ("kimi-k2", '<|tool_calls_section_begin|><|tool_call_begin|>bash<|tool_call_argument_begin|>{"command": "ls"}<|tool_call_end|>', "", GOOD),  # noqa: E501
        ("kimi-k2", '<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{"command": "l', "", [("bash", '{"command": "l')]),  # noqa: E501
        ("kimi-k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>", BAD, []),
        ("kimi-k2", "<|tool_calls_section_begin|><|tool_call_begin|>3<|tool_call_argument_begin|>{}<|tool_call_end|>", BAD, []),  # noqa: E501
        ("deepseek-v3", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n{"command": "ls"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", GOOD),  # noqa: E501
        ("deepseek-v3.1", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>bash<｜tool▁sep｜>{"command": "ls"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>bash<｜tool▁sep｜>ls<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", [*GOOD, ("bash", "ls")]),  # noqa: E501
        ("mistral", 'x[TOOL_CALLS]bash[ARGS]{"command": "ls"}[TOOL_CALLS]bash[ARGS]{}', "x", [*GOOD, ("bash", {})]),  # noqa: E501
        ("mistral", '[TOOL_CALLS]bash[CALL_ID]abc[ARGS]{"command": "ls"}', "", GOOD),
        ("mistral", "[TOOL_CALLS]bash", BAD, []),
        # JSON without marks
        ("llama-3", '{"name": "bash", "parameters": {"command": "ls"}}', "", GOOD),
        ("llama-3", 'x<|python_tag|>{"name": "bash", "parameters": {"command": "ls"}}; {"name": "bash", "arguments": {}}', "x", [*GOOD, ("bash", {})]),  # noqa: E501
        ("llama-3", '{"name": "Ann"}', BAD, []),
        ("llama-3", '{"name": "bash", "parameters": {}} and more', BAD, []),
        ("llama-3", '<|python_tag|>print("hi")', BAD, []),
        # harmony
        ("gpt-oss", '<|channel|>commentary<|message|>x<|end|><|start|>assistant<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"command": "ls"}<|call|>', "x", GOOD),  # noqa: E501
        ("gpt-oss", ' to=functions.bash<|channel|>commentary json<|message|>{"command": "ls"}', "", GOOD),
        ("gpt-oss", "<|channel|>final<|message|>x", "x", []),
        ("gpt-oss", "just text", BAD, []),
        ("gpt-oss", "<|channel|>nonsense<|message|>text", BAD, []),
    ],
)  # fmt: skip
def test_calls_whole_and_broken(name, text, content, calls):
    for cuts in ([], list(range(600))):
        message = parse(name, text, cuts)[1]
        assert message.content == (text if content is BAD else content)
        assert [(call.name, _value(call.arguments)) for call in message.tool_calls] == calls


def _value(text: str):
    try:
        return json.loads(text)
    except ValueError:
        return text


def test_harmony_channels_are_reasoning_and_content():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes."
    )
    assert without_ids(parse("gpt-oss", text)[1]) == ("Yes.", "Hm.\n\nSo.", [])
    # Without tools a call is text.
    called = "<|channel|>commentary to=functions.bash<|message|>{}"
    assert parse("gpt-oss", called, calls=False)[1].content == called


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "llama-3"])
def test_arguments_flow_while_they_are_sampled(name):
    family, body = FAMILIES[name], "word " * 200
    call = ToolCall("c", "bash", json.dumps({"command": body}))
    asked = [Message("user", "x")]
    prefix = Prefix()
    head = assets(name).renderer.render(asked, prefix, add_generation_prompt=True)
    text = assets(name).renderer.render(
        [*asked, Message("assistant", "", "", (call,))], prefix, add_generation_prompt=False
    )
    opened = family.reasoning is not None and family.reasoning.open_after(head[-40:])
    made = AnswerParser(
        family, assets(name).tokenizer, stop_ids=assets(name).stop_ids, tools=TOOLS, opened=opened
    )
    sizes = [len(made.push([token])) for token in assets(name).tokenizer.encode(text.removeprefix(head))]
    assert sum(size > 0 for size in sizes) > 500


SHIM = Path(engines.__file__).with_name("cpu_shim")  # for machines without a GPU
SGLANG = """
import json, sys
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

tools, cases = json.load(sys.stdin)
tools = [Tool(**tool) for tool in tools]
answers = []
for parser, text in cases:
    content, calls = FunctionCallParser(tools, parser).parse_non_stream(text)
    answers.append([content, [[call.name, json.loads(call.parameters)] for call in calls]])
print("RESULT" + json.dumps(answers))
"""
DETECTORS = {
    "qwen3-thinking": "qwen25",
    "qwen3-coder": "qwen3_coder",
    "qwen3.5": "qwen3_coder",
    "nemotron-3": "qwen3_coder",
    "glm-4.5": "glm45",
    "glm-4.7": "glm47",
    "kimi-k2": "kimi_k2",
    "minimax-m2": "minimax-m2",
    "deepseek-v3": "deepseekv3",
    "deepseek-v3.1": "deepseekv31",
    "deepseek-v3.2": "deepseekv32",
    "llama-3": "llama3",
    "mistral": "mistral",
    "gpt-oss": "gpt-oss",
}


@pytest.mark.engine
def test_sglang_reads_the_same_calls():
    """Our parsers and those of SGLang, on what our templates write."""
    issued = [
        {"command": 'echo "hé"\nls <x> && y', "n": 2, "on": True},
        {"command": "3", "items": ["a", {"b": None}]},
    ]
    cases, expected = [], []
    for name, detector in DETECTORS.items():
        # Llama's is read one call at a time, with no text beside it.
        for used in (issued[:1], issued[:1] if name == "llama-3" else issued):
            calls = tuple(ToolCall(f"c{n}", "bash", json.dumps(a)) for n, a in enumerate(used))
            said = "" if name == "llama-3" else "Hi."
            prefix = Prefix(
                kwargs={"enable_thinking": False} if "enable_thinking" in FAMILIES[name].kwargs else {}
            )
            asked = [Message("user", "x")]
            renderer = assets(name).renderer
            head = renderer.render(asked, prefix, add_generation_prompt=True)
            text = renderer.render(
                [*asked, Message("assistant", said, "", calls)], prefix, add_generation_prompt=False
            )
            text = text.removeprefix(head).removesuffix(FAMILIES[name].closer)
            text = text.removeprefix("\n</think>\n\n")
            ours = parse(name, text)[1]
            found = [(call.name, json.loads(call.arguments)) for call in ours.tool_calls]
            # Where the prompt has closed the reasoning, GLM-4.5 writes its newline ahead of the content.
            expected.append((name, ours.content.lstrip("\n"), found))
            assert expected[-1][1:] == (said, [("bash", a) for a in used])
            cases.append((detector, ("<|start|>assistant" if name == "gpt-oss" else "") + text))
    run = subprocess.run(
        [str(engine_python()), "-c", SGLANG],
        input=json.dumps(
            [[{**tool, "function": {**tool["function"], "description": ""}} for tool in TOOLS], cases]
        ),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(SHIM), "SGLANG_USE_CPU_ENGINE": "1"},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    theirs = json.loads(run.stdout.partition("RESULT")[2])
    for (name, content, found), (their_content, their_calls) in zip(expected, theirs, strict=True):
        assert their_calls == [list(call) for call in found], name
        assert their_content.strip() == content, name
