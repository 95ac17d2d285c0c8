"""SIGKILL of each process of a real run, in mid-episode: nothing stays behind, and the run goes on."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from titogym.trainer.runs import RunDirectory

pytestmark = [pytest.mark.engine, pytest.mark.train, pytest.mark.sandbox, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).parents[2]


@dataclass
class Run:
    """`titogym train` as a process, and what it started."""

    directory: Path
    driver: "subprocess.Popen[bytes] | None" = None

    @property
    def records(self) -> RunDirectory:
        return RunDirectory(self.directory / "run")

    @property
    def output(self) -> str:
        return (self.directory / "out.txt").read_text()

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        self.driver = subprocess.Popen(
            [sys.executable, "-m", "titogym", "train", str(self.directory / "config.toml"), *arguments],
            stdout=(self.directory / "out.txt").open("w"),
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return self.driver

    def wait_for_step(self, step: int) -> None:
        assert self.driver is not None
        deadline = time.monotonic() + 400
        while not any(record["step"] >= step for record in self.records.metrics()):
            assert self.driver.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.2)

    def wait_for_an_episode(self) -> None:
        deadline = time.monotonic() + 60
        while not self.sandboxes():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def sandboxes(self) -> list[Path]:
        root = self.directory / "sandboxes"
        return list(root.iterdir()) if root.exists() else []

    def descendants(self) -> list[psutil.Process]:
        assert self.driver is not None
        found: list[psutil.Process] = psutil.Process(self.driver.pid).children(recursive=True)
        return found


@pytest.fixture
def run(tiny_model: Path) -> Iterator[Run]:
    directory = Path(tempfile.mkdtemp(prefix="titogym-kill-"))
    directory.chmod(0o755)  # every sandbox has a user of its own
    (directory / "config.toml").write_text(f"""
[run]
dir = "{directory / "run"}"
steps = 100000

[model]
dir = "{tiny_model}"
family = "qwen3"

[engine]
dtype = "float32"

[environment]
source = "{REPOSITORY / "envs" / "tasks"}"

[sandbox]
root = "{directory / "sandboxes"}"

[rollout]
samples_per_prompt = 2
groups_per_step = 2
episodes_in_flight = 8
max_tokens_per_turn = 12
max_turns = 2

[checkpoint]
every = 1
""")
    started = Run(directory)
    yield started
    if started.driver is not None and started.driver.poll() is None:
        started.driver.kill()
        started.driver.wait()
    shutil.rmtree(directory)


def command_line(process: psutil.Process) -> list[str]:
    try:
        words: list[str] = process.cmdline()
    except psutil.NoSuchProcess:
        return []  # a sandbox's process that has ended
    return words


def listening(processes: list[psutil.Process]) -> set[int]:
    """TCP ports on which they listen."""
    ports = set()
    for process in processes:
        try:
            ports |= {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        except psutil.NoSuchProcess:
            continue  # a sandbox's process that has ended
    return ports


def assert_gone(processes: list[psutil.Process], ports: set[int]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive, [command_line(process) for process in alive]
    assert not ports & {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def test_kill_engine_gateway_and_driver_then_finish(run: Run) -> None:
    driver = run.start()
    run.wait_for_step(2)
    for victim, name in (("sglang.launch_server", "engine"), ("serve", "gateway")):
        run.wait_for_an_episode()
        killed = [child for child in run.descendants() if victim in command_line(child)]
        assert len(killed) == 1
        killed[0].kill()
        step = run.records.metrics()[-1]["step"]
        run.wait_for_step(step + 3)  # the run goes on with another one
        assert f"Replaced the {name}" in run.output
        assert driver.poll() is None
    # Whatever replaced an engine served nothing before it had the weights.
    for record in run.records.metrics():
        assert record["staleness/coverage"] == 1.0

    run.wait_for_an_episode()
    children = run.descendants()
    ports = listening(children)
    assert len(ports) >= 2  # engine and gateway
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert_gone(children, ports)
    step = max(run.records.checkpoints())

    driver = run.start("--resume", "--set", "cluster.max_restarts=0")
    run.wait_for_step(step + 2)
    children = run.descendants()
    ports = listening(children)
    (gateway,) = (child for child in children if "serve" in command_line(child))
    gateway.kill()
    assert driver.wait(90) == 2, run.output
    last_words = run.output.strip().rsplit("titogym: ", 1)[-1]
    assert "gateway" in last_words, run.output
    assert "--resume" in last_words
    assert run.sandboxes() == []
    assert_gone(children, ports)

    step = max(run.records.checkpoints())
    driver = run.start("--resume", "--set", f"run.steps={step + 2}")
    assert driver.wait(400) == 0, run.output
    steps = [record["step"] for record in run.records.metrics()]
    assert steps == list(range(1, step + 3))  # none lost, none doubled
    assert run.sandboxes() == []
    assert (run.records.model / "model.safetensors").exists()
