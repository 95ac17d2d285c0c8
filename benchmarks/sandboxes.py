"""How long an agent waits for its sandbox: cold start against a warm pool, side by side.

    python -m benchmarks.sandboxes                    # local
    python -m benchmarks.sandboxes --docker           # and docker, on an engine that it starts (root)
    DOCKER_HOST=... python -m benchmarks.sandboxes --docker --image python:3.12-slim

Each episode gets a sandbox with the files of a generated shell task, and keeps it for `--work` seconds;
`--at-once` of them run at a time. Warm: a pool of the same size makes the next ones ready meanwhile.
"""

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from titogym.envs.registry import tasks
from titogym.envs.sandboxes.base import Sandbox, SandboxBackend, SandboxSpec
from titogym.envs.sandboxes.pool import WarmPool
from titogym.envs.sandboxes.registry import backend
from titogym.envs.task import Task
from titogym.envs.terminal import TerminalEnvironment


@dataclass(frozen=True, slots=True)
class Measured:
    waits: list[float]  # s until an agent could begin, in order of the episodes
    seconds: float  # for all episodes


def main(
    episodes: Annotated[int, typer.Option(min=1)] = 40,
    at_once: Annotated[int, typer.Option(min=1)] = 4,
    work: Annotated[float, typer.Option(min=0, help="Seconds for which an agent uses its sandbox.")] = 1.0,
    docker: Annotated[bool, typer.Option("--docker", help="Measure the docker sandbox too.")] = False,
    image: Annotated[str | None, typer.Option(help="Image of the docker sandboxes.")] = None,
) -> None:
    """Print the table."""
    table = Table(title=f"{episodes} episodes, {at_once} at once, {work:g} s of work each")
    for heading in ("sandbox", "start", "wait, median", "wait, 90 %", "wait, longest", "episodes/s"):
        table.add_column(heading, justify="left" if heading in ("sandbox", "start") else "right")
    for name in ["local", "docker"] if docker else ["local"]:
        own = name == "docker" and "DOCKER_HOST" not in os.environ
        with _engine() if own else nullcontext(image) as made:
            options = {"image": made} if name == "docker" and made else {}
            for start, warm in (("cold", 0), ("warm", at_once)):
                found = asyncio.run(_measure(name, options, episodes, at_once, work, warm))
                waits = sorted(found.waits)
                table.add_row(
                    name,
                    start,
                    f"{statistics.median(waits) * 1000:.0f} ms",
                    f"{waits[int(len(waits) * 0.9)] * 1000:.0f} ms",
                    f"{waits[-1] * 1000:.0f} ms",
                    f"{episodes / found.seconds:.2f}",
                )
    Console().print(table)


async def _measure(
    name: str, options: dict[str, str], episodes: int, at_once: int, work: float, warm: int
) -> Measured:
    made = backend(name, labels={"run": "benchmark"}, **options)
    task = tasks("shell", count=1)[0]
    waits: list[float] = []
    places = asyncio.Semaphore(at_once)
    try:
        await (await _ready(made, task)).destroy()  # connects, and looks at the machine
        async with _starts(made, task, episodes, warm) as start:

            async def episode(number: int) -> None:
                async with places:
                    began = time.monotonic()
                    sandbox = await start(number)
                    waits.append(time.monotonic() - began)
                    try:
                        await sandbox.exec("ls", timeout=30)
                        await asyncio.sleep(work)
                    finally:
                        await sandbox.destroy()

            began = time.monotonic()
            await asyncio.gather(*(episode(number) for number in range(episodes)))
            return Measured(waits, time.monotonic() - began)
    finally:
        await made.close()


@asynccontextmanager
async def _starts(
    made: SandboxBackend, task: Task, episodes: int, warm: int
) -> AsyncIterator[Callable[[int], Awaitable[Sandbox]]]:
    """How episode `number` gets its sandbox; `warm` are kept ready."""
    pool: WarmPool[int, Sandbox] = WarmPool(warm, lambda sandbox: sandbox.destroy())

    async def start(number: int) -> Sandbox:
        return await pool.take(number) or await _ready(made, task)

    if warm:
        for number in range(episodes):
            pool.announce(number, partial(_ready, made, task))
    try:
        yield start
    finally:
        await pool.close()


async def _ready(made: SandboxBackend, task: Task) -> Sandbox:
    sandbox = await made.create(SandboxSpec.for_task(task))
    try:
        await TerminalEnvironment().reset(task, sandbox)
    except BaseException:
        await sandbox.destroy()
        raise
    return sandbox


@contextmanager
def _engine() -> Iterator[str]:
    """The image to use on an engine that is started for this."""
    from tests.envs.engine import SYSTEM, load_images, private_engine

    with private_engine() as address:
        load_images(address)
        os.environ["DOCKER_HOST"] = address
        yield SYSTEM


if __name__ == "__main__":
    typer.run(main)
