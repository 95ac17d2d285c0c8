"""What the doctor finds out about harnesses, good and bad, that really run."""

import asyncio
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.harnesses import agents
from titogym.cli.main import app
from titogym.errors import UserError
from titogym.gateway.tokens.parsers.answer import AnswerParser
from titogym.harnesses import scripted_model
from titogym.harnesses.openai_loop import OpenAILoop

PROGRAM = str(Path(agents.__file__))
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)


def doctor(*words: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["doctor", "harness", "--json", *words])
    assert result.exit_code in (0, 1), result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return result.exit_code, report


def habit(name: str, *options: str) -> tuple[int, dict[str, Any]]:
    return doctor(*options, sys.executable, PROGRAM, name)


def lost(report: dict[str, Any]) -> dict[str, int]:
    return {name: fate["lost"] for name, fate in report["matchers"].items()}


@pytest.mark.sandbox
def test_openai_loop_trains_token_exact() -> None:
    status, report = doctor("openai_loop")
    assert (status, report["token_exact"], report["problems"]) == (0, True, [])
    assert (report["needs"], report["used"], report["turns"]) == ("strict", "strict", 5)
    assert report["prompts"] == report["prompts_in_rows"] == 5
    assert report["trained_tokens"] == report["sampled_tokens"] > 300
    (endpoint,) = report["endpoints"]
    assert (endpoint["path"], endpoint["protocol"]) == ("/v1/chat/completions", "chat")
    assert endpoint["statuses"] == {"200": 5}
    assert {field["name"] for field in report["fields"]} == {"model", "messages", "tools"}
    assert (report["streaming"], report["rewrites"], report["side_requests"]) == ("never", [], [])


def test_a_harness_that_drops_reasoning_and_writes_arguments_anew() -> None:
    """It loses every turn under the strict matcher, and none under one that bears what it does."""
    status, report = habit("drops", "--matcher", "strict")
    assert status == 1
    assert report["needs"] == "omit_reasoning"
    counts = lost(report)
    # One of the five answers has no reasoning that could be dropped.
    assert counts == {"strict": 4, "loose_tool_call": 3, "omit_reasoning": 0, "call_id": 0}
    assert "reasoning" in report["problems"][0]
    assert "the matcher omit_reasoning bears it" in report["problems"][0]
    changed = {one["field"]: one for one in report["rewrites"]}
    assert changed.keys() == {"reasoning", "tool_calls.arguments"}
    assert changed["reasoning"]["sent"] == ""
    assert changed["tool_calls.arguments"]["held"] == '{"command" :  "echo titogym doctor one"}'
    assert changed["tool_calls.arguments"]["sent"] == '{"command": "echo titogym doctor one"}'

    status, report = habit("drops")
    assert (status, report["used"], report["token_exact"]) == (0, "omit_reasoning", True)


def test_a_harness_that_adds_arguments_is_known_by_the_ids_of_its_calls() -> None:
    status, report = habit("defaults")
    assert (status, report["needs"]) == (0, "call_id")
    assert report["mismatches"] == {"harness: it rewrote tool_calls.arguments": 4}


@pytest.mark.parametrize(("name", "culprit"), [("ids", "assistant"), ("clock", "system")])
def test_a_harness_that_no_matcher_bears(name: str, culprit: str) -> None:
    """With ids of its own, or a clock in its system prompt, it starts anew at every turn."""
    status, report = habit(name)
    assert (status, report["token_exact"], report["needs"]) == (1, False, None)
    assert all(count >= 3 for count in lost(report).values())
    assert culprit in report["problems"][0]
    assert report["lost"][0]["held"] != report["lost"][0]["sent"]


def test_fields_without_effect_and_side_requests() -> None:
    status, report = habit("extras")
    fates = {field["name"]: field["fate"] for field in report["fields"]}
    assert status == 0
    assert (fates["user"], fates["frobnicate"], fates["temperature"]) == ("ignored", "ignored", "heeded")

    status, report = habit("title")
    assert status == 0
    assert report["side_requests"] == ["Give this task a title."]
    assert report["matchers"]["strict"]["roots"] == 2


@pytest.mark.parametrize(
    ("name", "path", "protocol", "streaming"),
    [
        ("anthropic", "/v1/messages", "messages", "never"),
        ("streams", "/v1/chat/completions", "chat", "always"),
        ("responses", "/v1/responses", "responses", "never"),
    ],
)
def test_every_protocol_is_seen(name: str, path: str, protocol: str, streaming: str) -> None:
    status, report = habit(name)
    assert (status, report["problems"], report["outcome"]) == (0, [], "finished"), report
    assert [(one["path"], one["protocol"]) for one in report["endpoints"]] == [(path, protocol)]
    assert (report["turns"], report["streaming"]) == (5, streaming)


def test_a_refused_field_is_named() -> None:
    status, report = habit("refused")
    assert (status, report["turns"], report["outcome"]) == (1, 0, "crashed")
    assert {field["name"]: field["fate"] for field in report["fields"]}["n"] == "refused"
    assert report["refusals"][0]["param"] == "n"


def test_a_program_that_asks_nothing() -> None:
    status, report = doctor("true")
    assert status == 1
    assert "base URL" in report["problems"][0]


def test_a_program_that_crashes_before_it_asks_is_judged_by_its_crash() -> None:
    status, report = doctor("sh", "-c", "echo no such setting; exit 3")
    assert status == 1
    told = (
        "It failed before it asked a model anything: It ended with status 3; its last words: no such setting."
    )
    assert report["problems"] == [told]


def test_the_gateways_log_stays_out_of_what_is_told(caplog: pytest.LogCaptureFixture) -> None:
    habit("drops")
    assert [record.getMessage() for record in caplog.records if record.name == "titogym.gateway"] == []


@pytest.mark.sandbox
def test_the_time_of_installing_is_not_the_harnesss(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[float] = []

    async def prepare(self: OpenAILoop) -> None:
        if not installed:
            await asyncio.sleep(2)
            installed.append(time.monotonic())

    monkeypatch.setattr(OpenAILoop, "prepare", prepare)
    status, report = doctor("openai_loop")
    assert status == 0
    assert report["seconds"] < time.monotonic() - installed[0]


def test_a_program_that_hangs_is_stopped() -> None:
    status, report = doctor("--seconds", "1", "sleep 60")
    assert (status, report["outcome"]) == (1, "timeout")


def test_it_tells_a_person_too() -> None:
    command = ["doctor", "harness", "--matcher", "strict", sys.executable, PROGRAM, "drops"]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 1
    for words in ("/v1/chat/completions", "Does not train token-exact", "omit_reasoning bears it", "held"):
        assert words in result.output


def test_mistakes_are_told() -> None:
    for words, told in (
        (["no-such-program-here"], "does not start"),
        (["--matcher", "sloppy", "true"], "No matcher"),
        (["-o", "x=1", "true"], "not for a command"),
        (["openai_loop", "-o", "x=1"], "before its name"),
    ):
        result = CliRunner().invoke(app, ["doctor", "harness", *words])
        assert isinstance(result.exception, UserError), words
        assert told in str(result.exception)


def test_in_a_sandbox_the_model_writes_by_the_harness_own_tools_and_sends_a_helper() -> None:
    def tool(name: str, *parameters: str) -> dict[str, Any]:
        properties = {parameter: {"type": "string"} for parameter in parameters}
        return {"name": name, "parameters": {"properties": properties, "required": list(parameters)}}

    tools = [
        tool("Bash", "command"),
        tool("Write", "file_path", "content"),
        tool("Edit", "file_path", "old_string", "new_string"),
        {**tool("Agent", "description", "prompt"), "description": "a general-purpose agent"},
    ]
    lines = "\n".join(json.dumps({"type": "function", "function": one}) for one in tools)
    head = f"<tools>\n{lines}\n</tools><|im_start|>user\n"
    turns = [
        scripted_model.answer(head + "Do it." + "<|im_start|>assistant\n" * turn, "/w")
        for turn in range(1, 8)
    ]
    called = [name for turn in turns for name in re.findall(r'"name": "(\w+)"', turn)]
    assert called == ["Bash", "Bash", "Bash", "Bash", "Agent", "Write", "Edit"]
    assert '"file_path" :  "/w/doctor.txt"' in turns[5]
    asked = re.search(r'"prompt" :  "([^"]+)"', turns[3])
    assert asked is not None
    helper = [
        scripted_model.answer(head + asked[1] + "<|im_start|>assistant\n" * turn, "/w") for turn in (1, 2)
    ]
    assert ["tool_call" in turn for turn in helper] == [True, False]


def test_the_models_answers_are_what_the_gateway_reads(tmp_path: Path) -> None:
    """Every turn of the plan parses into what it means to say, for schemas as harnesses have them."""
    assets = scripted_model.write_model(tmp_path / "model")
    schema = {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "mode": {"enum": ["a", "b"]},
            "depth": {"type": ["integer", "null"]},
            "where": {"anyOf": [{"type": "object", "required": ["path"]}]},
        },
        "required": ["command", "mode", "depth", "where"],
    }
    tools = [{"name": "title", "parameters": {}}, {"name": "shell", "parameters": schema}]
    lines = "\n".join(json.dumps({"type": "function", "function": tool}) for tool in tools)
    counts = []
    for turn in range(6):
        prompt = f"<tools>\n{lines}\n</tools>" + "<|im_start|>assistant\n" * (turn + 1)
        parser = AnswerParser(assets.family, assets.tokenizer, stop_ids=assets.stop_ids)
        parser.push(assets.tokenizer.encode(scripted_model.answer(prompt)))
        parser.finish()
        message = parser.message()
        counts.append(len(message.tool_calls))
        for call in message.tool_calls:
            assert call.name == "shell"
            arguments = json.loads(call.arguments)
            assert arguments["command"][:2] == ["bash", "-lc"]
            assert (arguments["mode"], arguments["depth"], arguments["where"]) == ("a", 1, {"path": "."})
    assert counts == [1, 2, 1, 1, 0, 0]


def test_without_tools_it_writes_blocks_of_the_kind_that_is_asked_for() -> None:
    asked = "Write ```my_bash_block\n...```; end with echo COMPLETE_TASK_NOW.<|im_start|>assistant\n"
    assert f"```my_bash_block\n{scripted_model.ECHO} 0\n```" in scripted_model.answer(asked)
    last = scripted_model.answer(asked + "<|im_start|>assistant\n" * 3)
    assert "```my_bash_block\necho COMPLETE_TASK_NOW\n```" in last
