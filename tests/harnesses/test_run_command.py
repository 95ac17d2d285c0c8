"""`titogym run` as a person uses it: a process of its own, with its own gateway process."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from tests.doubles.scripted_engine import ScriptedEngine
from tests.harnesses.world import World, call, processes, say
from titogym.cli.attempting import key_values
from titogym.cli.main import app
from titogym.errors import UserError
from titogym.gateway.launch import GatewayProcess

pytestmark = pytest.mark.sandbox


@pytest.fixture
def task_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "greet"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text("[agent]\ntimeout_sec = 30.0\n[environment]\nworkdir = '/app'\n")
    (folder / "instruction.md").write_text("Write hello into greeting.txt.\n")
    (folder / "tests" / "test.sh").write_text(
        "echo looked\n"
        "if grep -qsx hello greeting.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    )
    return folder


@dataclass
class Cli:
    sandboxes: Path

    async def __call__(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = await self.start(*words, **env)
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode is not None
        return subprocess.CompletedProcess(words, process.returncode, out.decode(), err.decode())

    async def start(self, *words: str, **env: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "titogym", "run", *words),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TITOGYM_SANDBOXES": str(self.sandboxes), "COLUMNS": "120", **env},
        )


@pytest.fixture
def cli(world: World) -> Cli:
    return Cli(world.backend.root)


async def test_an_attempt_is_told_turn_by_turn(world: World, cli: Cli, task_dir: Path) -> None:
    world.script(call("echo hello > greeting.txt; seq 100"), say("I greeted."))
    done = await cli(str(task_dir), "--engine", world.engine.url)
    assert (done.returncode, done.stderr) == (0, "")
    for text in (
        "Write hello into greeting.txt.",
        "$ echo hello > greeting.txt; seq 100",
        "… 88 lines …",
        "I greeted.",
        "finished after 2 turns",
        "reward 1",
        "mean log-prob -0.",
        "weight version default",
        "tito_session_mismatch: none",
        "--tokens",
    ):
        assert text in done.stdout, text
    assert world.left_on_disk() == []


async def test_attempts_as_json_hold_everything(world: World, cli: Cli, task_dir: Path) -> None:
    world.script(call("echo $RANDOM > greeting.txt"), say("done"))
    words = ["--engine", world.engine.url, "--attempts", "3", "--json", "-o", "system=Be brief."]
    done = await cli(str(task_dir), *words, "--temperature", "0.5", "--max-tokens", "200")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["tasks"] == ["greet"]
    assert [attempt["reward"] for attempt in told["attempts"]] == [0.0, 0.0, 0.0]
    for attempt in told["attempts"]:
        (trajectory,) = attempt["trajectories"]
        assert len(trajectory["tokens"]) == len(trajectory["logprobs"]) == len(trajectory["loss_mask"])
        assert attempt["messages"][0]["messages"][0] == {"role": "system", "content": "Be brief."}
    asked = [request["sampling_params"] for request in world.engine.requests]
    assert {params["temperature"] for params in asked} == {0.5}
    assert {params["max_new_tokens"] for params in asked} == {200}


async def test_a_failed_attempt_gives_status_1_and_its_cause(world: World, cli: Cli, task_dir: Path) -> None:
    world.script(call("true"))
    done = await cli(str(task_dir), "--engine", world.engine.url, "--turns", "2")
    assert done.returncode == 1
    assert "turn_limit after 2 turns" in done.stdout
    assert "limit of 2 turns" in done.stdout
    assert "reward 0" in done.stdout
    assert "looked" in done.stdout


async def test_a_program_that_crashes_shows_the_end_of_its_output(
    world: World, cli: Cli, task_dir: Path
) -> None:
    words = ["--harness", "command", "-o", "command=sh -c 'echo my last words; exit 3'"]
    done = await cli(str(task_dir), "--engine", world.engine.url, *words)
    assert done.returncode == 1
    assert "my last words" in done.stdout
    assert "status 3" in done.stdout


async def test_a_running_gateway_is_used_and_keeps_the_session(
    world: World, cli: Cli, task_dir: Path, gateway_process: GatewayProcess
) -> None:
    world.script(say("done"))
    url, key = gateway_process.url, gateway_process.admin_key
    done = await cli(str(task_dir), "--gateway", url, TITOGYM_ADMIN_KEY=key)
    assert done.returncode == 0, done.stdout + done.stderr
    (session,) = await world.gateway.sessions()
    assert f"titogym session inspect {session['id']} --tokens --gateway {url}" in done.stdout
    await world.gateway.delete(session["id"])


async def test_tokens_are_shown_one_by_one(world: World, cli: Cli, task_dir: Path) -> None:
    world.script(say("done"))
    done = await cli(str(task_dir), "--engine", world.engine.url, "--tokens")
    assert "token by token" in done.stdout
    assert "<|im_start|>assistant" in done.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--engine", "http://127.0.0.1:1"], "No SGLang engine answers at http://127.0.0.1:1"),
        (["--gateway", "http://127.0.0.1:1"], "The gateway at http://127.0.0.1:1 does not answer"),
        ([], "--engine URL"),
        (["--engine", "http://a", "--gateway", "http://b"], "not both"),
        (["--engine", "ENGINE", "--harness", "nobody"], "There is no harness 'nobody'"),
        (["--engine", "ENGINE", "--harness", "command"], "command"),
        (["--engine", "http://[::1"], "is no URL"),
        (["--gateway", "http://[::1"], "does not answer"),
        (["--gateway", "http://127.0.0.1:1", "--admin-key", "clé"], "does not answer"),
        (["--engine", "ENGINE", "-o", "sistem=x"], "sistem"),
        (["--engine", "ENGINE", "-o", "retries=often"], "retries = 'often'"),
        (["--engine", "ENGINE", "-o", "system"], "KEY=VALUE"),
        (["--engine", "ENGINE", "--model-dir", "/no/such/model"], "/no/such/model"),
        (["--engine", "ENGINE", "--family", "latin"], "latin"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(
    engine: ScriptedEngine, task_dir: Path, words: list[str], sentence: str
) -> None:
    words = [word.replace("ENGINE", engine.url) for word in words]
    done = CliRunner().invoke(app, ["run", str(task_dir), *words])
    assert isinstance(done.exception, UserError), done.output
    assert sentence in str(done.exception)
    assert len(str(done.exception).splitlines()) == 1
    assert done.output == ""


async def test_a_refusal_is_one_line_and_status_2(cli: Cli, task_dir: Path) -> None:
    done = await cli(str(task_dir), "--engine", "http://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("titogym: No SGLang engine answers at http://127.0.0.1:1")
    assert len(done.stderr.strip().splitlines()) == 1


async def test_a_task_without_tests_is_refused(world: World, cli: Cli, task_dir: Path) -> None:
    (task_dir / "tests" / "test.sh").unlink()
    done = await cli(str(task_dir), "--engine", world.engine.url)
    assert done.returncode == 2
    assert "needs a test script" in done.stderr


async def test_a_model_that_is_elsewhere_must_be_named(
    world: World, cli: Cli, task_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.engine, "model_path", "Qwen/Qwen3-0.6B")
    done = await cli(str(task_dir), "--engine", world.engine.url)
    assert done.returncode == 2
    assert "--model-dir" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_an_interrupted_run_leaves_no_process(
    world: World, cli: Cli, task_dir: Path, number: signal.Signals
) -> None:
    world.script(call("setsid sleep 1000 & sleep 1000"))
    driver = await cli.start(str(task_dir), "--engine", world.engine.url)
    deadline = time.monotonic() + 40
    while not any("sleep" in name_of(child) for child in below(driver.pid)):
        assert time.monotonic() < deadline
        assert driver.returncode is None
        await asyncio.sleep(0.05)
    everything = below(driver.pid)
    assert any("serve" in " ".join(child.cmdline()) for child in everything)
    driver.send_signal(number)
    await asyncio.wait_for(driver.communicate(), 20)
    deadline = time.monotonic() + 10
    while any(child.is_running() and child.status() != "zombie" for child in everything):
        assert time.monotonic() < deadline, [child.cmdline() for child in everything if child.is_running()]
        await asyncio.sleep(0.05)
    assert processes(driver.pid) == []
    if number != signal.SIGKILL:
        assert driver.returncode == (130 if number == signal.SIGINT else 143)
        assert world.left_on_disk() == []
    else:
        world.script(say("done"))
        assert (await cli(str(task_dir), "--engine", world.engine.url)).returncode == 0
        assert world.left_on_disk() == []


def name_of(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


def below(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def test_options_are_json_or_text() -> None:
    words = ["a=1", 'b={"x": [true]}', "c=plain text=yes", "d="]
    assert key_values(words) == {"a": 1, "b": {"x": [True]}, "c": "plain text=yes", "d": ""}
    with pytest.raises(UserError):
        key_values(["=3"])
