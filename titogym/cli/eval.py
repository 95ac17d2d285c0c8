"""`titogym eval`: many attempts at many tasks, measured: pass@k with intervals, costs, causes of failure."""

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from titogym.cli import attempting as shared
from titogym.errors import UserError

if TYPE_CHECKING:
    from titogym.envs.sandboxes.base import SandboxBackend
    from titogym.envs.task import Task
    from titogym.harnesses.base import Harness
    from titogym.harnesses.evaluation.records import EvaluationDirectory

_RESULTS = Path("evals")


def command(
    source: shared.SourceArgument,
    harness: shared.HarnessOption = "openai_loop",
    engine: shared.EngineOption = None,
    gateway: shared.GatewayOption = None,
    admin_key: shared.KeyOption = None,
    model_dir: shared.ModelOption = None,
    family: shared.FamilyOption = None,
    attempts: Annotated[
        int, typer.Option("--attempts", "-n", min=1, help="Episodes of each task; pass@k goes up to it.")
    ] = 1,
    count: Annotated[
        int | None, typer.Option(min=1, help="How many tasks; default: all, 100 of a generator.")
    ] = None,
    split: shared.SplitOption = "test",
    seed: shared.SeedOption = 0,
    concurrency: Annotated[int, typer.Option("--concurrency", "-j", min=1, help="Episodes in flight.")] = 8,
    warm: Annotated[int, typer.Option(min=0, help="Sandboxes that are made ready ahead.")] = 2,
    success: Annotated[
        float, typer.Option(min=0, max=1, help="Least reward of an attempt that passes.")
    ] = 1.0,
    out: Annotated[
        Path | None, typer.Option(help="Where results go; default: a new directory in evals/.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on in --out: make what is missing, or failed without the model's doing."
        ),
    ] = False,
    option: shared.HarnessOptions = None,
    sandbox: shared.SandboxOption = "local",
    sandbox_option: shared.SandboxOptions = None,
    matcher: shared.MatcherOption = None,
    policy: shared.PolicyOption = None,
    temperature: shared.TemperatureOption = None,
    max_tokens: shared.MaxTokensOption = None,
    turns: shared.TurnsOption = None,
) -> None:
    """Measure an agent: mean reward and pass@k with 95 % intervals, cost in tokens and seconds.

    Writes episodes.jsonl, a file per episode and report.html. Ctrl-C keeps what has ended, and writes the
    report of it; --resume goes on from there. `titogym show DIR` lists the episodes and replays any.
    """
    from titogym.cli.evaluation_view import EvaluationView
    from titogym.harnesses.evaluation.records import EvaluationDirectory, missing
    from titogym.harnesses.registry import harness as make_harness

    shared.end_on_sigterm()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if resume and out is None:
        raise UserError("Say what to resume: --out DIR.")
    tasks = shared.find_tasks(source, split=split, seed=seed, count=count, turns=turns, sandbox=sandbox)
    options = shared.key_values(option or [])
    agent = make_harness(harness, **options)
    session = shared.session_options(policy, matcher, temperature, max_tokens)
    settings: dict[str, Any] = {
        "source": source,
        "split": split,
        "seed": seed,
        "tasks": len(tasks),
        "attempts": attempts,
        "planned": len(tasks) * attempts,
        "model": str(model_dir or engine or gateway),
        "harness": harness,
        "options": options,
        "session": session,
        "turns": turns,
        "success": success,
        "sandbox": sandbox,
    }
    backend = shared.sandbox_backend(sandbox, sandbox_option or [], "titogym-eval")
    directory = EvaluationDirectory(out or _fresh(source))
    directory.check(settings, resume=resume)
    with shared.serving(engine, gateway, admin_key, model_dir, family) as (url, key):
        asyncio.run(_require_ready(url, key))
        directory.create(settings)
        due = _due(missing([task.id for task in tasks], attempts, directory.records()), tasks)
        view = EvaluationView(directory, settings)
        status, fault = 0, None
        with view:
            try:
                asyncio.run(
                    _evaluate(
                        due,
                        directory,
                        view,
                        where=(url, key),
                        agent=agent,
                        backend=backend,
                        session=session,
                        concurrency=concurrency,
                        warm=warm,
                    )
                )
            except KeyboardInterrupt:
                status = 130
            except SystemExit as ended:  # SIGTERM
                status = int(ended.code or 0)
            except UserError as error:
                fault = error
    view.finish(interrupted=status != 0)
    if fault is not None:
        raise fault
    if status:
        raise typer.Exit(status)


async def _require_ready(url: str, key: str | None) -> None:
    from titogym.gateway.client import GatewayClient

    async with GatewayClient(url, key) as client:
        await shared.require_ready(client, url)


async def _evaluate(
    due: "Sequence[tuple[Task, int]]",
    directory: "EvaluationDirectory",
    view: Any,
    *,
    where: tuple[str, str | None],
    agent: "Harness",
    backend: "SandboxBackend",
    session: dict[str, Any],
    concurrency: int,
    warm: int,
) -> None:
    from titogym.gateway.client import GatewayClient
    from titogym.harnesses.episode import EpisodeResult, run_episode
    from titogym.harnesses.evaluation.running import evaluate
    from titogym.harnesses.warm import WarmStarts

    try:
        async with GatewayClient(*where) as client:
            await agent.prepare()
            ahead = WarmStarts(warm, harness=agent, backend=backend, gateway=client)
            for task, number in due:
                ahead.announce(task, {"attempt": str(number)})

            async def attempt(task: "Task", number: int) -> EpisodeResult:
                return await run_episode(
                    task,
                    harness=agent,
                    backend=backend,
                    gateway=client,
                    session_options=session,
                    labels={"attempt": str(number)},
                    keep_session=True,
                    warm=ahead,
                )

            try:
                await evaluate(
                    due,
                    directory,
                    attempt,
                    client,
                    concurrency=concurrency,
                    started=view.started,
                    ended=view.ended,
                )
            finally:
                await ahead.close()
    finally:
        await agent.close()
        await backend.close()


def _due(missing: Sequence[tuple[str, int]], tasks: "Sequence[Task]") -> "list[tuple[Task, int]]":
    by_name = {task.id: task for task in tasks}
    return [(by_name[name], attempt) for name, attempt in missing]


def _fresh(source: str) -> Path:
    """evals/SOURCE-DATE, which nobody has used."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", source.rstrip("/").rpartition("/")[2]).strip("-.") or "tasks"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    found = _RESULTS / f"{name}-{stamp}"
    number = 1
    while found.exists():
        number += 1
        found = _RESULTS / f"{name}-{stamp}-{number}"
    return found
