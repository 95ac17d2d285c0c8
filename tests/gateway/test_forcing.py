"""Calls that a request insists on: the grammar of each family, held against xgrammar and our parsers."""

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.scripted_engine import Fault
from tests.gateway.conftest import Serve, Served
from tests.gateway.test_family_parsers import FAMILIES, assets
from tests.gateway.test_turns import CALL, USER, create, inspect, replay, sdk, trajectories
from tests.gateway.test_turns import TOOLS as BASH
from titogym.gateway.app import create_app
from titogym.gateway.engines.environment import engine_python
from titogym.gateway.engines.launch import EngineProcess
from titogym.gateway.settings import GatewaySettings
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


def written(
    name: str, prefix: Prefix, after: Role, *calls: tuple[str, dict[str, Any]], said: str = ""
) -> str:
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
    """For every family: calls as its template writes them; neither text, other tools nor bad arguments."""
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
                    tag = forced_calls(assets(name).renderer, prefix, after=after, names=names, single=single)
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
    for (tag, given), verdicts, wanted in zip(cases, found, expected, strict=True):
        wrong = [text for text, is_, should in zip(given, verdicts, wanted, strict=True) if is_ != should]
        assert not wrong, (tag, wrong)


def test_what_ends_an_answer_behind_one_call() -> None:
    ends = {name: one_call_stops(assets(name).renderer, Prefix(tools=TOOLS), "user") for name in FAMILIES}
    shared = {"json_list", "bare_json", "marked_json"}
    for name, family in FAMILIES.items():
        assert family.tool_calls is not None
        if family.tool_calls.kind in shared or name in ("minimax-m2", "deepseek-v3.2"):
            assert ends[name] is None, name
        elif name == "gpt-oss":
            assert ends[name] == ()
        else:
            call = written(name, Prefix(tools=TOOLS), "user", ("bash", GOOD))
            more = written(name, Prefix(tools=TOOLS), "user", ("bash", GOOD), ("look", {}))
            found = [(more.index(end) + len(end), end) for end in ends[name] or () if end in more]
            assert more[: min(found)[0]] == call.rstrip("\n"), name


ASKS: list[tuple[str, Any]] = [  # how each protocol insists on a call, and allows one alone
    ("chat/completions", {"tool_choice": "required", "parallel_tool_calls": False}),
    ("chat/completions", {"tool_choice": {"type": "function", "function": {"name": "bash"}}}),
    ("responses", {"tool_choice": "required"}),
    ("responses", {"tool_choice": {"type": "function", "name": "bash"}, "parallel_tool_calls": False}),
    ("messages", {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}),
    ("messages", {"tool_choice": {"type": "tool", "name": "bash"}}),
]


@pytest.mark.parametrize(("path", "choice"), ASKS)
def test_the_engine_is_given_the_grammar(serve: Serve, path: str, choice: Any) -> None:
    """In all three protocols, and the call is what any other call is."""
    stand = serve([CALL, "done"])
    session = create(stand.url)
    function = BASH[0]["function"]
    tools = {
        "chat/completions": BASH,
        "responses": [{"type": "function", **function}],
        "messages": [{"name": "bash", "input_schema": function["parameters"]}],
    }[path]
    asked = {"input": "Look."} if path == "responses" else {"messages": [USER], "max_tokens": 90}
    body = {"model": "m", "tools": tools, **asked, **choice}
    answer = httpx.post(f"{session.base_url}/{path}", json=body).raise_for_status().text
    assert '"bash"' in answer
    [sent] = stand.engine.requests
    tag = json.loads(sent["sampling_params"]["structural_tag"])
    assert tag["type"] == "structural_tag"
    single = "parallel_tool_calls" in choice or "disable_parallel_tool_use" in str(choice)
    assert ('"star"' in sent["sampling_params"]["structural_tag"]) is not single
    assert inspect(stand.url, session)["diagnostics"]["ignored"] == {}


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_alone_ends_the_answer(serve: Serve, stream: bool) -> None:
    """The model would make two; what is committed is what was sampled up to the end of the first."""
    stand = serve([f"I look.\n{CALL}\n{CALL}", "done"])
    session = create(stand.url)
    client = sdk(session)
    asked: dict[str, Any] = {"model": "m", "tools": BASH, "parallel_tool_calls": False}
    if stream:
        with client.chat.completions.stream(messages=[USER], **asked) as events:
            first = events.get_final_completion()
    else:
        first = client.chat.completions.create(messages=[USER], **asked)
    [call] = first.choices[0].message.tool_calls or []
    assert first.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "a"}
    client.chat.completions.create(messages=[USER, replay(first), result], **asked)
    [found] = trajectories(stand.url, session)
    text = stand.assets.tokenizer.decode(found["tokens"])
    assert text.count(CALL) == 1
    sampled = stand.assets.tokenizer.encode(f"I look.\n{CALL}")
    at = len(stand.engine.requests[0]["input_ids"])
    assert found["tokens"][at : at + len(sampled)] == sampled
    assert found["loss_mask"][at : at + len(sampled) + 1] == [1] * len(sampled) + [0]
    assert inspect(stand.url, session)["diagnostics"]["ignored"] == {}


def test_families_that_write_calls_as_one_say_that_they_cannot_stop(serve: Serve) -> None:
    stand = serve(["no"], family="smollm2")
    session = create(stand.url)
    sdk(session).chat.completions.create(model="m", messages=[USER], tools=BASH, parallel_tool_calls=False)
    assert inspect(stand.url, session)["diagnostics"]["ignored"].keys() == {"parallel_tool_calls"}


def test_a_call_and_a_schema_exclude_each_other(serve: Serve) -> None:
    session = create(serve(["no"]).url)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    body = {"messages": [USER], "tools": BASH, "tool_choice": "required", "response_format": form}
    answer = httpx.post(f"{session.base_url}/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"


@pytest.mark.parametrize("status", [200, 400])
def test_a_schema_that_the_engine_refuses_is_the_clients_fault(serve: Serve, status: int) -> None:
    stand = serve(["no"])
    session = create(stand.url)
    stand.engine.faults.append(
        Fault("abort" if status == 200 else "error", status=400, message="Failed to compile json grammar: no")
    )
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}
    answer = httpx.post(
        f"{session.base_url}/chat/completions", json={"messages": [USER], "response_format": form}
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("response_format", "invalid_json_schema")
    assert error["type"] == "invalid_request_error"


@pytest.mark.engine
def test_a_random_model_calls_when_it_must(sglang_server: EngineProcess, tiny_model: Path) -> None:
    """On the real engine: a model that has never seen a tool makes the call that was asked for."""
    settings = GatewaySettings(engines=(sglang_server.url,), model_dir=tiny_model, family="qwen3")
    served = Served(create_app(settings))
    try:
        url = f"http://127.0.0.1:{served.port}"
        session = create(url)
        schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
        tools: list[Any] = [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name in ("light", "door")
        ]
        client = sdk(session)
        messages: list[Any] = [USER]
        for stream, choice in (
            (False, "required"),
            (True, {"type": "function", "function": {"name": "door"}}),
        ):
            asked: dict[str, Any] = {
                "model": "m",
                "tools": tools,
                "tool_choice": choice,
                "parallel_tool_calls": False,
                "max_tokens": 900,
                "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
            }
            if stream:
                with client.chat.completions.stream(messages=messages, **asked) as events:
                    answer = events.get_final_completion()
            else:
                answer = client.chat.completions.create(messages=messages, **asked)
            [call] = answer.choices[0].message.tool_calls or []
            assert answer.choices[0].finish_reason == "tool_calls"
            assert call.function.name in (("door",) if stream else ("light", "door"))
            assert isinstance(json.loads(call.function.arguments)["on"], bool)
            messages += [replay(answer), {"role": "tool", "tool_call_id": call.id, "content": "ok"}]
        [found] = trajectories(url, session)
        assert found["turns"] == 2
        broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}
        refused = httpx.post(
            f"{create(url).base_url}/chat/completions",
            json={"messages": [USER], "response_format": broken},
            timeout=60,
        )
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "response_format"
    finally:
        served.stop()
