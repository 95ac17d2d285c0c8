"""`titogym eval` and `titogym show` as a person runs them, against the real gateway and a scripted engine."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.harnesses.world import World, raw_call
from titogym.cli.main import app
from titogym.errors import UserError
from titogym.gateway.launch import GatewayProcess
from titogym.harnesses.episode import EpisodeResult
from titogym.harnesses.evaluation.records import EvaluationDirectory

pytestmark = pytest.mark.sandbox

SOURCE = "arithmetic?level=1"


@dataclass
class Cli:
    gateway: GatewayProcess
    out: Path
    env: dict[str, str]

    async def start(self, *words: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "titogym", *words),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.env,
        )

    async def __call__(self, *words: str) -> tuple[int, str]:
        """Status and output."""
        process = await self.start(*words)
        out, err = await asyncio.wait_for(process.communicate(), 90)
        assert process.returncode is not None
        return process.returncode, out.decode() + err.decode()

    def eval(self, *words: str, count: int = 3, attempts: int = 2) -> tuple[str, ...]:
        told = (
            "--gateway",
            self.gateway.url,
            "--count",
            str(count),
            "-n",
            str(attempts),
            "--out",
            str(self.out),
        )
        return ("eval", SOURCE, *told, *words)

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "episodes.jsonl").read_text().splitlines()]


@pytest.fixture
def cli(world: World, gateway_process: GatewayProcess, tmp_path: Path) -> Cli:
    env = {
        **os.environ,
        "TITOGYM_SANDBOXES": str(world.backend.root),
        "TITOGYM_ADMIN_KEY": gateway_process.admin_key,
        "COLUMNS": "150",
    }
    return Cli(gateway_process, tmp_path / "results", env)


def solve(world: World, *, hang_after: int | None = None) -> None:
    """Calls the calculator, then answers: rightly where the problem adds, wrongly elsewhere."""
    tokenizer = world.engine.tokenizer
    assert tokenizer is not None
    answered = 0

    def script(prompt: list[int], params: dict[str, Any]) -> str:
        nonlocal answered
        text = tokenizer.decode(prompt)
        found = re.search(r"What is (\d+) (.) (\d+)\?", text)
        assert found is not None
        a, operation, b = int(found[1]), found[2], int(found[3])
        if "<tool_response>" not in text and '"calculate", "arguments"' not in text.rpartition("What is")[2]:
            return raw_call("calculate", json.dumps({"a": a, "operation": operation, "b": b}))
        answered += 1
        world.engine.token_latency = 0.0 if hang_after is None or answered < hang_after else 2.0
        return f"{a + b if operation == '+' else 'I do not know'}<|im_end|>"

    world.engine.script = script


def shown(*words: str) -> str:
    """What `titogym show` prints, run in this process."""
    done = CliRunner().invoke(app, ["show", *words], env={"COLUMNS": "150"})
    assert done.exit_code == 0, done.output
    return done.output


def refused(words: Sequence[str]) -> str:
    """The sentence by which a command ends at once, run in this process."""
    done = CliRunner().invoke(app, list(words))
    assert isinstance(done.exception, UserError), done.output
    return str(done.exception)


async def test_an_evaluation_is_measured_kept_and_shown(world: World, cli: Cli) -> None:
    solve(world)
    status, told = await cli(*cli.eval("-j", "4"))
    assert status == 0, told
    records = cli.records()
    assert len(records) == 6
    assert {record["outcome"] for record in records} == {"finished"}
    assert {record["turns"] for record in records} == {2}
    assert all(record["tokens"] > 0 and record["prompt_tokens"] > 0 for record in records)
    mean = sum(record["reward"] for record in records) / 6
    assert 0 < mean < 1  # the problems of the seed both add and do not
    assert re.search(rf"pass@2 +│ +{mean:.3f} │ +0\.\d+ to ", told)
    assert "6/6 arithmetic" in told

    page = (cli.out / "report.html").read_text()
    assert f"pass@1 {mean:.3f}" in page
    assert "<script" not in page
    assert not re.search(r"""(src|href)=["']?http""", page)
    assert "calculate(" in page

    assert "arithmetic-1-test-0-2 #1" in shown(str(cli.out))
    told = shown(str(cli.out / records[0]["file"]))
    for text in (
        "What is",
        "calculate(",
        "turn 2",
        f"reward {records[0]['reward']:g}",
        "numeric",
        "expected",
    ):
        assert text in told, text

    for words, sentence in (
        (cli.eval(), "go on with it by --resume"),
        (cli.eval("--resume", "--temperature", "0.5"), "was begun with session"),
        (cli.eval("--resume", count=4), "was begun with tasks = 3, not 4"),
    ):
        assert sentence in refused(words), words


async def test_an_interrupted_one_is_usable_and_goes_on(world: World, cli: Cli) -> None:
    solve(world, hang_after=3)
    driver = await cli.start(*cli.eval("-j", "1"))
    deadline = time.monotonic() + 60
    while not (cli.out / "episodes.jsonl").exists() or len(cli.records()) < 2:
        assert time.monotonic() < deadline
        assert driver.returncode is None
        await asyncio.sleep(0.05)
    driver.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(driver.communicate(), 60)
    told = out.decode() + err.decode()
    assert driver.returncode == 130, told
    assert "Traceback" not in told
    assert f"--resume --out {cli.out}" in told
    first = cli.records()
    assert len(first) < 6
    assert f"{6 - len(first)} of 6 episodes are not made yet" in (cli.out / "report.html").read_text()
    assert "arithmetic-1-test-0-0 #0" in shown(str(cli.out))

    with (cli.out / "episodes.jsonl").open("a") as lines:  # as a kill in mid-write would leave it
        lines.write('{"task": "arith')
        lines.write("\n")
    solve(world)
    status, told = await cli(*cli.eval("--resume"))
    assert status == 0, told
    assert f"{len(first)} episodes are there already" in told
    whole = [
        json.loads(line)
        for line in (cli.out / "episodes.jsonl").read_text().splitlines()
        if line.endswith("}")
    ]
    assert len(whole) == 6
    assert len({(record["task"], record["attempt"]) for record in whole}) == 6


async def test_run_tells_a_few_tasks_of_a_generator(world: World, cli: Cli) -> None:
    solve(world)
    status, told = await cli("run", SOURCE, "--gateway", cli.gateway.url, "--count", "2", "--json")
    assert status == 0, told
    made = json.loads(told)
    assert made["tasks"] == ["arithmetic-1-train-0-0", "arithmetic-1-train-0-1"]
    assert [attempt["task_id"] for attempt in made["attempts"]] == made["tasks"]
    assert all(attempt["turns"] == 2 for attempt in made["attempts"])
    for session in await world.gateway.sessions():
        await world.gateway.delete(session["id"])


async def test_failures_are_grouped_and_made_again(world: World, cli: Cli) -> None:
    world.script("<|im_end|>")
    words = ("--option", 'request={"temperature": "hot"}')
    status, told = await cli(*cli.eval(*words, count=2, attempts=1))
    assert status == 0
    assert re.search(r"│ 2 +│ crashed +│ The gateway refused the agent's request", told)
    assert [record["reward"] for record in cli.records()] == [0.0, 0.0]
    assert "crashed" in shown(str(cli.out), "--episode", "1")
    status, told = await cli(*cli.eval(*words, "--resume", count=2, attempts=1))
    assert "episodes are there already" not in told
    assert len(cli.records()) == 4


async def test_one_that_cannot_begin_is_given_up(world: World, cli: Cli) -> None:
    """No program can play an environment that answers turn by turn."""
    words = ("--harness", "command", "-o", "command=/bin/true", "-j", "4")
    status, told = await cli(*cli.eval(*words, count=40, attempts=1))
    assert status == 2, told
    assert "16 episodes in a row could not begin" in told
    assert "use the harness openai_loop" in told
    assert 16 <= len(cli.records()) < 24
    assert (cli.out / "report.html").exists()


def test_a_place_that_keeps_nothing_is_named() -> None:
    with pytest.raises(UserError, match="cannot be kept in /proc/x"):
        EvaluationDirectory(Path("/proc/x")).create({})


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["eval", "nowhere", "--gateway", "http://127.0.0.1:1"], "There are no tasks at 'nowhere'"),
        (["eval", SOURCE, "--gateway", "http://127.0.0.1:1", "--resume"], "--out DIR"),
        (["eval", SOURCE], "--engine URL"),
        (["eval", SOURCE, "--gateway", "http://127.0.0.1:1", "--out", "OUT"], "does not answer"),
        (["eval", SOURCE, "--gateway", "http://g", "--out", "OUT", "--resume"], "no evaluation to resume"),
        (["run", SOURCE, "--gateway", "http://g", "--sandbox", "cloud"], "no sandbox backend 'cloud'"),
        (["show", "OUT", "--episode", "1"], "holds no evaluation"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(
    tmp_path: Path, words: list[str], sentence: str
) -> None:
    assert sentence in refused([word.replace("OUT", str(tmp_path / "results")) for word in words])


def test_two_evaluations_do_not_share_a_directory(tmp_path: Path) -> None:
    first = EvaluationDirectory(tmp_path)
    first.create({"source": "x"})
    with pytest.raises(UserError, match="An evaluation is going on in"):
        EvaluationDirectory(tmp_path).create({"source": "x"})
    del first
    EvaluationDirectory(tmp_path).create({"source": "x"})


def test_every_episode_has_a_file_of_its_own_and_a_torn_line_spoils_no_other(tmp_path: Path) -> None:
    directory = EvaluationDirectory(tmp_path)
    directory.create({})
    names = ["a/b", "a_b", "一", "二", "x" * 130, "y" + "x" * 130]
    for name in names:
        directory.add(EpisodeResult(name, "finished", 1.0), 0, [])
    assert {directory.episode(f"{name} #0")["task"] for name in names} == set(names)
    with (tmp_path / "episodes.jsonl").open("a") as lines:
        lines.write('{"task": "torn", "att')
    del directory
    directory = EvaluationDirectory(tmp_path)
    directory.create({})
    directory.add(EpisodeResult("next", "finished", 1.0), 0, [])
    assert {record.task for record in directory.records()} == {*names, "next"}
