"""Whether one driver holds many episodes at once, and holds on to nothing: 128 in flight, 2,000 in all.

    python -m benchmarks.concurrency [--episodes N] [--in-flight N] [--turns N]

Real gateway, real local sandboxes, real grading; only the engine is scripted, in a process of its own, and
takes a moment for every token. Every hundred episodes a row says what the driver and the gateway use:
memory (RSS), file descriptors and threads, and how many sessions, sandboxes and processes there are.
It fails if something is left at the end, or if memory or descriptors grow from the first quarter to the last.
"""

import asyncio
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from tests.doubles.scripted_engine import ScriptedEngine
from tests.templates.models import write_model_dir
from titogym.envs.sandboxes.local import LocalBackend
from titogym.envs.task import Limits, Task
from titogym.gateway.client import GatewayClient
from titogym.gateway.launch import GatewayProcess, launch
from titogym.harnesses.episode import EpisodeResult, run_episode
from titogym.harnesses.openai_loop import OpenAILoop
from titogym.processes import spawn
from titogym.templates.families import BUILT_IN
from titogym.templates.tokenizer import Tokenizer

_MIB = 1 << 20
_CONTEXT = 8192
_GROWTH = 1.15  # last quarter over first quarter of the steady state: more is a leak
_TEST = "#!/bin/bash\ntest -e /workspace/done; echo $((1 - $?)) > /logs/verifier/reward.txt\n"


@dataclass(frozen=True, slots=True)
class Row:
    """What there is at one moment."""

    seconds: int
    episodes: int
    driver_mib: int
    driver_fds: int
    driver_threads: int
    gateway_mib: int
    gateway_fds: int
    sessions: int
    sandboxes: int
    processes: int


def main(
    episodes: Annotated[int, typer.Option(min=1)] = 2000,
    in_flight: Annotated[int, typer.Option(min=1)] = 128,
    turns: Annotated[int, typer.Option(min=1)] = 4,
    every: Annotated[int, typer.Option(min=1, help="Episodes between rows.")] = 100,
    token_seconds: Annotated[float, typer.Option(help="What the engine takes for a token.")] = 0.02,
    engine_dir: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print the table; exit with status 1 when something grows or is left."""
    if engine_dir is not None:
        _serve_engine(engine_dir, turns, token_seconds)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 16384)), hard))
    root = Path(tempfile.mkdtemp(prefix="titogym-concurrency-", dir="/var/tmp"))
    root.chmod(0o711)
    try:
        family = next(family for family in BUILT_IN if family.name == "quickstart")
        model = write_model_dir(root / "model", family, context_length=_CONTEXT)
        line = [sys.executable, "-m", "benchmarks.concurrency", "--engine-dir", str(model)]
        line += ["--turns", str(turns), "--token-seconds", str(token_seconds)]
        engine = spawn("engine", line, log=root / "engine.log")
        engine.wait_ready(lambda: "http" in (root / "engine.log").read_text(), 60)
        gateway = launch([(root / "engine.log").read_text().split()[0]], model, directory=root)
        try:
            sound = asyncio.run(_run(root, gateway, episodes, in_flight, turns, every))
        finally:
            gateway.stop()
            engine.stop()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    raise typer.Exit(0 if sound else 1)


def _serve_engine(model: Path, turns: int, token_seconds: float) -> None:
    tokenizer = Tokenizer.load(model)

    def answer(prompt: list[int], params: dict[str, Any]) -> str:
        engine.requests.clear()
        turn = tokenizer.decode(prompt).count("<|im_start|>assistant")
        if turn >= turns:
            return "That is all.<|im_end|>"
        command = f"seq 200; sleep 0.2; echo {turn} >> log; touch done; sleep 60 </dev/null >/dev/null 2>&1 &"
        return f'<tool_call>{{"name": "bash", "arguments": {{"command": "{command}"}}}}</tool_call><|im_end|>'

    engine = ScriptedEngine(
        answer,
        tokenizer=tokenizer,
        token_latency=token_seconds,
        tokens_per_chunk=16,
        context_length=_CONTEXT,
        model_path=str(model),
    )
    with engine:
        print(engine.url, flush=True)
        while True:
            time.sleep(3600)


async def _run(
    root: Path, gateway: GatewayProcess, episodes: int, in_flight: int, turns: int, every: int
) -> bool:
    backend, agent = LocalBackend(root / "sandboxes"), OpenAILoop()
    outcomes: Counter[str] = Counter()
    rows: list[Row] = []
    places = asyncio.Semaphore(in_flight)
    started = time.monotonic()
    print("  ".join(f"{field.name:>14}" for field in fields(Row)), flush=True)
    async with GatewayClient(gateway.url, gateway.admin_key) as client:

        async def row() -> None:
            rows.append(await _look(root, gateway, client, time.monotonic() - started, outcomes.total()))
            print("  ".join(f"{value:>14}" for value in astuple(rows[-1])), flush=True)

        async def episode(number: int) -> None:
            async with places:
                result: EpisodeResult = await run_episode(
                    _task(number, turns), harness=agent, backend=backend, gateway=client
                )
            outcomes[result.outcome if result.reward == 1.0 else f"{result.outcome}: {result.error}"] += 1
            if outcomes.total() % every == 0:
                await row()

        await row()
        async with asyncio.TaskGroup() as group:
            for number in range(episodes):
                group.create_task(episode(number))
        await asyncio.sleep(1)
        await row()
    await backend.close()
    seconds = time.monotonic() - started
    print(f"{episodes} episodes in {seconds:.0f} s ({episodes / seconds:.1f}/s): {dict(outcomes)}")
    return _judge(rows, in_flight) and set(outcomes) == {"finished"}


def _task(number: int, turns: int) -> Task:
    return Task(
        id=f"task-{number}",
        instruction="Do it.",
        files={"notes.txt": "first line\n" * 50},
        tests={"test.sh": _TEST},
        limits=Limits(
            turns=turns + 2, agent_seconds=600.0, verifier_seconds=120.0, memory_mb=256, storage_mb=64
        ),
    )


async def _look(
    root: Path, gateway: GatewayProcess, client: GatewayClient, seconds: float, episodes: int
) -> Row:
    driver, server = psutil.Process(), psutil.Process(gateway.child.pid)
    sessions = await client.sessions()
    directory = root / "sandboxes"
    return Row(
        round(seconds),
        episodes,
        driver.memory_info().rss // _MIB,
        driver.num_fds(),
        driver.num_threads(),
        server.memory_info().rss // _MIB,
        server.num_fds(),
        len(sessions),
        len(os.listdir(directory)) if directory.exists() else 0,
        len(driver.children(recursive=True)),
    )


def _judge(rows: list[Row], in_flight: int) -> bool:
    """Print what has grown or is left; True when nothing is."""
    first, *steady, last = rows
    steady = [row for row in steady if row.episodes >= 2 * in_flight and row.sessions >= in_flight // 2]
    complaints = []
    for name in ("driver_mib", "driver_fds", "driver_threads", "gateway_mib", "gateway_fds"):
        values = [getattr(row, name) for row in steady]
        quarter = max(1, len(values) // 4)
        if len(values) < 4:
            break
        before, after = statistics.mean(values[:quarter]), statistics.mean(values[-quarter:])
        print(f"{name}: {before:.0f} in the first quarter of the steady state, {after:.0f} in the last")
        if after > before * _GROWTH:
            complaints.append(f"{name} grows from {before:.0f} to {after:.0f}")
    for name in ("sessions", "sandboxes"):
        if getattr(last, name):
            complaints.append(f"{getattr(last, name)} {name} are left")
    for name in ("processes", "driver_fds"):
        if getattr(last, name) > getattr(first, name) + 2:
            complaints.append(f"{name}: {getattr(first, name)} before, {getattr(last, name)} after")
    print("; ".join(complaints) or "Nothing grows, and nothing is left.")
    return not complaints


if __name__ == "__main__":
    typer.run(main)
