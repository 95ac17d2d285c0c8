"""What tests of harnesses share: scripts for the engine, tasks, and the check that nothing is left."""

import asyncio
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.doubles.scripted_engine import ScriptedEngine
from titogym.envs.sandboxes.local import LocalBackend
from titogym.envs.task import Limits, Task
from titogym.gateway.client import GatewayClient
from titogym.harnesses.base import Harness
from titogym.harnesses.episode import EpisodeResult, run_episode

CONTEXT_LENGTH = 6000

PASS = "echo 1 > /logs/verifier/reward.txt"
PASS_IF_DONE = "test -e /workspace/done; echo $((1 - $?)) > /logs/verifier/reward.txt"


def call(command: str, *, name: str = "bash") -> str:
    """An assistant turn of the quickstart family that calls the tool."""
    return raw_call(name, json.dumps({"command": command}))


def raw_call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call><|im_end|>'


def say(text: str) -> str:
    return f"{text}<|im_end|>"


def task(test: str = PASS, *, instruction: str = "Do it.", **limits: Any) -> Task:
    """A task whose test script is `test`."""
    return Task(
        id="sample",
        instruction=instruction,
        files={"notes.txt": "first line\n"},
        tests={"test.sh": f"#!/bin/bash\n{test}\n"},
        limits=Limits(**{"agent_seconds": 30.0, "verifier_seconds": 20.0, "turns": 10, **limits}),
    )


@dataclass
class World:
    engine: ScriptedEngine
    gateway: GatewayClient
    backend: LocalBackend
    driver: int  # pid of the process that owns the sandboxes

    def script(self, *texts: str) -> None:
        """Answer turn `n` of every conversation with `texts[n]`, and with the last one for ever after."""
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None

        def script(prompt: list[int], params: dict[str, Any]) -> str:
            turn = tokenizer.decode(prompt).count("<|im_start|>assistant") - 1
            return texts[min(turn, len(texts) - 1)]

        self.engine.script = script

    async def run(self, task: Task, harness: Harness, **options: Any) -> EpisodeResult:
        return await run_episode(task, harness=harness, backend=self.backend, gateway=self.gateway, **options)

    def prompts(self) -> list[str]:
        """What the engine was sent, as text."""
        assert self.engine.tokenizer is not None
        return [self.engine.tokenizer.decode(request["input_ids"]) for request in self.engine.requests]

    def encode(self, text: str) -> list[int]:
        assert self.engine.tokenizer is not None
        return self.engine.tokenizer.encode(text)

    def left_on_disk(self) -> list[str]:
        root: Path = self.backend.root
        return sorted(entry.name for entry in root.iterdir())

    async def assert_nothing_left(self) -> None:
        assert self.left_on_disk() == []
        assert processes(self.driver) == []
        assert await self.gateway.sessions() == []
        deadline = time.monotonic() + 5
        while self.engine.in_flight and time.monotonic() < deadline:  # noqa: ASYNC110 (an abort travels)
            await asyncio.sleep(0.01)
        assert self.engine.in_flight == 0


def processes(driver: int) -> list[str]:
    """Processes in sandboxes that process `driver` made: they bear the sandbox's id, which bears its pid."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                line = Path(entry.path, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if any(_is_sandbox_of(word, driver) for word in line.split()):
                found.append(f"{entry.name} {line[:120]}")
    return found


def _is_sandbox_of(word: str, driver: int) -> bool:
    parts = word.split("-")
    return len(parts) == 4 and parts[0].isdecimal() and parts[1] == str(driver)
