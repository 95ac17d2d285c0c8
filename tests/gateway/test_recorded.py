"""What real harness programs sent, sent again: one lineage per agent, every token exact, nothing refused."""

import httpx
import pytest

from tests.doubles.scripted_engine import Fault, ScriptedEngine
from tests.gateway.conftest import Stand
from tests.gateway.recorded import FOLDER, Replayer, recorded, written
from tests.gateway.test_turns import create, inspect, trajectories
from titogym.gateway.settings import GatewaySettings
from titogym.templates.model import load_model_assets

# The tightest matcher under which each program keeps its lineages, and the turns of each lineage: one per
# agent and side request, and one more for every answer that the program dropped and asked for again.
PROGRAMS = {
    "ai-sdk-anthropic": ("strict", [5]),
    "ai-sdk-compat": ("loose_tool_call", [5]),
    "ai-sdk-compat-stream": ("loose_tool_call", [5]),
    "ai-sdk-openai-chat": ("omit_reasoning", [5]),
    "ai-sdk-openai-resp": ("loose_tool_call", [5]),
    "anthropic-sdk-dump": ("strict", [5]),
    "anthropic-sdk-obj": ("strict", [5]),
    "anthropic-sdk-stream": ("strict", [5]),
    "claude-code": ("call_id", [1, 5]),  # title, main agent
    "claude-code-mal": ("call_id", [1, 7, 7]),
    "claude-code-sub": ("call_id", [1, 2, 2, 6]),  # two agents of the main agent's
    "codex": ("strict", [5]),
    "codex-mal": ("strict", [7]),
    "langchain": ("omit_reasoning", [5]),
    "langchain-mal": ("omit_reasoning", [4]),
    "langchain-responses": ("strict", [5]),
    "langchain-stream": ("omit_reasoning", [5]),
    "mini-swe-text2": ("strict", [3, 3, 3]),
    "mini-swe-tool": ("strict", [5]),
    "mini-swe-tool-mal": ("strict", [4, 4, 4]),
    "openai-agents-chat": ("omit_reasoning", [6]),
    "openai-agents-mal": ("omit_reasoning", [5]),
    "openai-agents-responses": ("strict", [5]),
    "openai-agents-stream": ("omit_reasoning", [5]),
    "openai-sdk-dump": ("strict", [5]),
    "openai-sdk-dumpxn": ("strict", [5]),
    "openai-sdk-obj": ("strict", [5]),
    "openai-sdk-streamhelper": ("strict", [5]),
    "openai-sdk-todict": ("strict", [5]),
    "opencode": ("loose_tool_call", [1, 5]),
    "opencode-err": ("call_id", [1, 4]),
    "opencode-mal": ("call_id", [1, 7]),
    "opencode-sub": ("loose_tool_call", [1, 6]),
    "openhands": ("omit_reasoning", [5]),
    "openhands-mal": ("call_id", [9]),
    "qwen-agent-nous": ("strict", [2, 2]),  # it writes calls into the text itself, and differently
    "qwen-agent-raw": ("strict", [5]),
    "qwen-agent-raw-mal": ("strict", [7]),
    "terminus2": ("omit_reasoning", [6]),
    "terminus2-compact": ("omit_reasoning", [6]),
    "terminus2-interleaved": ("strict", [6]),
}
FAULTS = {
    "server_error": Fault("error", 0, 500),
    "rate_limit_error": Fault("error", 0, 503),
    "cut": Fault("drop", 3),
}


class RecordedStand(Stand):
    texts: list[str]


def test_every_recording_is_sent():
    assert {path.stem for path in FOLDER.glob("*.jsonl")} == PROGRAMS.keys()


@pytest.fixture(scope="module")
def stand(model_dirs):
    """One stand for all programs: each of their answers is written into `texts` before its request."""
    assets = load_model_assets(model_dirs["qwen3"])
    texts = [""]
    engine = ScriptedEngine(
        lambda prompt, params: assets.tokenizer.encode(f"{texts[0]}<|im_end|>"),
        tokenizer=assets.tokenizer,
        context_length=400_000,
        tokens_per_chunk=8,
    )
    engine.start()
    made = RecordedStand(
        GatewaySettings(engines=(engine.url,), model_dir=model_dirs["qwen3"]), engine, assets
    )
    made.texts = texts
    yield made
    made.stop()


@pytest.mark.parametrize("name", PROGRAMS)
def test_recorded_program_keeps_its_lineages(stand, name):
    matcher, turns = PROGRAMS[name]
    session = create(stand.url, matcher=matcher, policy="branching")
    first = len(stand.engine.requests)
    program = Replayer(session.base_url)
    rows = []
    with httpx.Client(timeout=60) as http:
        for request in recorded(name):
            failed = request.answer.get("failed")
            if failed:
                stand.engine.faults.append(FAULTS[failed])
            stand.texts[:] = [written(request.answer) or "cut"]
            response = program.send(http, request)
            if not failed:
                assert response.status_code == 200, response.text
                prompt = stand.engine.requests[-1]["input_ids"]
                output = stand.assets.tokenizer.encode(f"{written(request.answer)}<|im_end|>")
                rows.append(([*prompt, *output], len(output)))
    found = trajectories(stand.url, session)
    assert sorted(trajectory["turns"] for trajectory in found) == turns
    for row, sampled in rows:
        assert any(
            trajectory["tokens"][: len(row)] == row
            and any(trajectory["loss_mask"][len(row) - sampled : len(row)])
            for trajectory in found
        )
    masked = sum(sum(trajectory["loss_mask"]) for trajectory in found)
    assert masked == sum(sampled for _, sampled in rows)  # each answer is trained on once
    assert len(stand.engine.requests) - first == len(list(recorded(name)))
    report = inspect(stand.url, session)
    kinds = set(report["tito_session_mismatch"])
    assert kinds <= {"assistant_text"}
