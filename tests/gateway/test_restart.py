"""The gateway as a process of its own: `titogym serve`, killed and started again."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.scripted_engine import ScriptedEngine
from tests.gateway.test_turns import CALL, TOOLS, USER, create, inspect, replay, sdk, trajectories
from titogym.gateway.client import SessionHandle
from titogym.processes import Child, free_port, spawn
from titogym.templates.model import load_model_assets


def start(tmp_path: Path, model_dir: Path, engine: str, port: int) -> Child:
    journal = tmp_path / "journal.sqlite"
    command = [sys.executable, "-m", "titogym", "serve", "--engine", engine, "--model-dir", str(model_dir)]
    command += ["--port", str(port), "--journal", str(journal)]
    child = spawn("gateway", command, log=tmp_path / "gateway.log")
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        try:
            return httpx.get(f"{url}/ready", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    child.wait_ready(ready, timeout=60)
    return child


def test_after_kill_9_a_restart_serves_every_session_as_committed(tmp_path, model_dirs):
    tokenizer = load_model_assets(model_dirs["qwen3"]).tokenizer
    answers = [f"look\n{CALL}", "a very long answer " * 40, "after the restart"]
    script = lambda prompt, params: tokenizer.encode(answers[0] + "<|im_end|>")  # noqa: E731
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with ScriptedEngine(script, tokenizer=tokenizer) as engine:
        gateway = start(tmp_path, model_dirs["qwen3"], engine.url, port)
        try:
            session, other = create(url, labels={"task": "t"}), create(url)
            first = sdk(session).chat.completions.create(model="m", messages=[USER], tools=TOOLS)
            messages = [USER, replay(first)]
            messages.append(
                {"role": "tool", "tool_call_id": first.choices[0].message.tool_calls[0].id, "content": "x"}
            )
            before = trajectories(url, session)
            # killed in mid-stream of the second turn
            answers.pop(0)
            engine.token_latency = 0.02
            stream = sdk(session).chat.completions.create(
                model="m", messages=messages, tools=TOOLS, stream=True
            )
            for _, _chunk in zip(range(5), stream, strict=False):
                pass
            os.kill(gateway.pid, signal.SIGKILL)
            gateway.process.wait(5)
            deadline = time.monotonic() + 5
            while engine.in_flight and time.monotonic() < deadline:
                time.sleep(0.01)
            assert engine.in_flight == 0
            gateway.stop()

            answers.pop(0)
            engine.token_latency = 0.0
            gateway = start(tmp_path, model_dirs["qwen3"], engine.url, port)
            assert {s["id"] for s in httpx.get(f"{url}/sessions").json()["sessions"]} == {
                session.id,
                other.id,
            }
            assert trajectories(url, session) == before
            second = sdk(session).chat.completions.create(model="m", messages=messages, tools=TOOLS)
            assert second.choices[0].message.content == "after the restart"
            [found] = trajectories(url, session)
            assert found["turns"] == 2
            assert found["tokens"][: len(before[0]["tokens"])] == before[0]["tokens"]
            assert inspect(url, session)["spec"]["labels"] == {"task": "t"}
        finally:
            gateway.stop()


def test_every_answer_that_a_client_has_seen_to_its_end_is_in_the_journal(tmp_path, model_dirs):
    """Killed right behind the last byte of an answer, again and again."""
    tokenizer = load_model_assets(model_dirs["qwen3"]).tokenizer
    with ScriptedEngine(
        lambda prompt, params: tokenizer.encode("ok<|im_end|>"), tokenizer=tokenizer
    ) as engine:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        session: SessionHandle | None = None
        messages: list[Any] = []
        for round_ in range(3):
            gateway = start(tmp_path, model_dirs["qwen3"], engine.url, port)
            session = session or create(url)
            messages.append({"role": "user", "content": f"{round_}"})
            answer = sdk(session).chat.completions.create(model="m", messages=messages, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
            os.kill(gateway.pid, signal.SIGKILL)
            gateway.stop()
            messages.append({"role": "assistant", "content": text})
            rows = (
                sqlite3.connect(tmp_path / "journal.sqlite").execute("SELECT count(*) FROM nodes").fetchone()
            )
            assert rows == (round_ + 1,)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "titogym", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_what_cannot_be_served_is_told_in_one_sentence(tmp_path, model_dirs):
    serve = ["serve", "--engine", "http://127.0.0.1:9", "--port", "0", "--model-dir"]
    model = str(model_dirs["qwen3"])
    for arguments, told in (
        ([*serve, str(tmp_path)], "family"),
        ([*serve, model, "--host", "0.0.0.0"], "set admin_key"),
        ([*serve, model, "--admin-key", "short"], "admin_key"),
    ):
        done = run(*arguments)
        assert done.returncode == 2, done.stderr
        assert told in done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_session_command(serve):
    stand = serve([f"<think>\nhm\n</think>\n\nhi [bold] é\n{CALL}"], admin_key="correct-horse")
    headers = {"authorization": "Bearer correct-horse"}
    made = httpx.post(f"{stand.url}/sessions", json={"labels": {"task": "t7"}}, headers=headers).json()
    session = SessionHandle(**made)
    sdk(session).chat.completions.create(model="m", messages=[USER], tools=TOOLS, extra_body={"store": True})
    options = ("--gateway", stand.url, "--admin-key", "correct-horse")
    listed = run("session", "list", *options)
    assert "task=t7" in listed.stdout
    shown = run("session", "inspect", session.id, "--tokens", *options)
    assert shown.returncode == 0, shown.stderr
    for part in ("hi [bold] é", "[bash]", "ignored store", "tito_session_mismatch: none", "Look around."):
        assert part in shown.stdout
    assert run("session", "delete", session.id, *options).returncode == 0
    gone = run("session", "inspect", session.id, *options)
    assert (gone.returncode, "no such session" in gone.stderr) == (2, True)
    refused = run("session", "list", "--gateway", stand.url)
    assert (refused.returncode, "--admin-key or TITOGYM_ADMIN_KEY" in refused.stderr) == (2, True)
    nobody = run("session", "list", "--gateway", "http://127.0.0.1:9").stderr
    assert "does not answer" in nobody
    assert "--gateway or TITOGYM_GATEWAY" in nobody
    assert "ConnectError" not in nobody


@pytest.mark.parametrize("module", ["torch", "transformers", "sglang", "numpy"])
def test_the_gateway_starts_without_heavy_packages(module):
    code = f"import sys, titogym.gateway.app; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
