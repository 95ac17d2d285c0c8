"""Calls that a request insists on: the grammar of each family, held against xgrammar and our parsers."""

import json
import subprocess
from typing import Any

import pytest

from tests.gateway.test_family_parsers import FAMILIES, assets
from titogym.gateway.engines.environment import engine_python
from titogym.gateway.tokens.forcing import forced_calls, one_call_stops
from titogym.templates.conversation import Message, Prefix, Role, ToolCall

PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {"type": "string"},
        "mode": {"enum": ["fast", "slow"]},
        "size": {"$ref": "#/$defs/size"},
        "on": {"type": "boolean"},
    },
    "required": ["command", "size"],
    "$defs": {"size": {"type": "integer"}},
}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
    for name, parameters in (("bash", PARAMETERS), ("look", EMPTY), ("other", PARAMETERS))
)
GOOD = {"command": 'echo "hé" && ls <x>\n', "mode": "slow", "size": 3}
CHECK = """
import json, sys
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

answers = []
for tag, texts in json.load(sys.stdin):
    grammar = xgrammar.Grammar.from_structural_tag(tag)
    answers.append([_is_grammar_accept_string(grammar, text) for text in texts])
print("RESULT" + json.dumps(answers))
"""


def variants(name: str) -> list[Prefix]:
    kwargs = [{}, *({key: v} for key, values in FAMILIES[name].kwargs.items() for v in values[1:])]
    return [Prefix(tools=TOOLS, kwargs=each) for each in kwargs]


def written(name: str, prefix: Prefix, after: Role, *calls: tuple[str, dict[str, Any]], said: str = "") -> str:
    """What the template writes for an answer, up to what closes it."""
    family, renderer = FAMILIES[name], assets(name).renderer
    asked = [Message("user", "x")]
    if after == "tool":
        asked += [
            Message("assistant", "x", tool_calls=(ToolCall("c", "look", "{}"),)),
            Message("tool", "x", tool_call_id="c"),
        ]
    made = tuple(ToolCall(f"c{n}", tool, json.dumps(given)) for n, (tool, given) in enumerate(calls))
    head = renderer.render(asked, prefix, add_generation_prompt=True)
    marks = family.reasoning
    thinks = marks is not None and marks.end not in renderer.opener(prefix, after=after)
    answered = [*asked, Message("assistant", said, "hm, <b>" if thinks else "", made)]
    text = renderer.render(answered, prefix, add_generation_prompt=False)
    assert text.startswith(head)
    return text.removeprefix(head).removesuffix((family.call_closer if made else "") or family.closer)


@pytest.mark.engine
def test_the_grammar_takes_what_the_template_writes():
    """For every family: calls as its template writes them, and neither text, other tools nor bad arguments."""
    cases: list[tuple[str, list[str]]] = []
    expected: list[list[bool]] = []
    for name, family in FAMILIES.items():
        harmony = family.tool_calls is not None and family.tool_calls.kind == "harmony"
        for prefix in variants(name):
            for after in ("user", "tool"):
                write = lambda *calls, said="", p=prefix, a=after: written(name, p, a, *calls, said=said)  # noqa: E731, B023
                texts = {
                    write(("bash", GOOD)): (True, True),
                    write(("bash", {"command": "", "size": -1, "on": True})): (True, True),
                    write(("look", {})): (True, False),
                    write(("other", GOOD)): (False, False),
                    write(("bash", {"command": "x", "size": "many"})): (False, False),
                    write(("bash", {"size": 1})): (False, False),
                    write(("bash", {"command": "x", "size": 1, "mode": "no"})): (False, False),
                    write(said="I will not."): (False, False),
                }
                if not harmony:  # where a call ends the answer
                    texts[write(("bash", GOOD), ("look", {}), ("bash", GOOD))] = (True, False)
                for column, (names, single) in enumerate(((("bash", "look"), False), (("bash",), True))):
                    tag = forced_calls(
                        assets(name).renderer, prefix, after=after, names=names, single=single
                    )
                    assert tag is not None, name
                    cases.append((tag, list(texts)))
                    expected.append([verdict[column] for verdict in texts.values()])
    run = subprocess.run(
        [str(engine_python()), "-c", CHECK],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.partition("RESULT")[2])
    for (tag, texts), verdicts, wanted in zip(cases, found, expected, strict=True):
        wrong = [text for text, is_, should in zip(texts, verdicts, wanted, strict=True) if is_ != should]
        assert not wrong, (tag, wrong)


def test_families_without_calls_cannot_be_forced():
    """Where the template does not write a call, there is no grammar for one."""
    model = assets("chatml")
    assert forced_calls(model.renderer, Prefix(tools=TOOLS), after="user", names=("bash",), single=True)
    assert one_call_stops(model.renderer, Prefix(tools=TOOLS), "user") == ("}</tool_call>", "}\n</tool_call>")
