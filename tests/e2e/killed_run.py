"""`titogym train` as a process of its own with real parts, for tests that kill those."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from titogym.trainer.runs.directory import RunDirectory

REPOSITORY = Path(__file__).parents[2]
GROUPS_PER_STEP = 2


def write_config(directory: Path, model: Path) -> None:
    """A run of small steps without an end, in `directory`."""
    (directory / "config.toml").write_text(f"""
[run]
dir = "{directory / "run"}"
steps = 100000

[model]
dir = "{model}"
family = "qwen3"

[environment]
source = "{REPOSITORY / "envs" / "tasks"}"

[sandbox]
root = "{directory / "sandboxes"}"

[rollout]
samples_per_prompt = 2
groups_per_step = {GROUPS_PER_STEP}
episodes_in_flight = 8
max_tokens_per_turn = 12
max_turns = 2

[checkpoint]
every = 1
""")


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

    def stop(self) -> None:
        """Kill it, if it still runs."""
        if self.driver is not None and self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()

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
