"""`titogym run`: attempts at a task or a few, told turn by turn."""

import asyncio
import base64
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from titogym.cli import attempting as shared

if TYPE_CHECKING:
    from titogym.envs.sandboxes.base import SandboxBackend
    from titogym.envs.task import Task
    from titogym.gateway.client import GatewayClient
    from titogym.gateway.trajectories import Trajectory
    from titogym.harnesses.base import Harness
    from titogym.harnesses.episode import EpisodeResult

AT_ONCE = 8  # attempts in flight


@dataclass(frozen=True, slots=True)
class Attempt:
    """An episode with what is needed to tell it: its turns, and its trajectories with their tokens' texts."""

    result: "EpisodeResult"
    turns: list[dict[str, Any]]
    texts: "list[tuple[Trajectory, list[str]]]"


def command(
    source: shared.SourceArgument,
    harness: shared.HarnessOption = "openai_loop",
    engine: shared.EngineOption = None,
    gateway: shared.GatewayOption = None,
    admin_key: shared.KeyOption = None,
    model_dir: shared.ModelOption = None,
    family: shared.FamilyOption = None,
    attempts: Annotated[int, typer.Option(min=1, help="How many episodes of each task to run.")] = 1,
    count: Annotated[int, typer.Option(min=1, help="How many of the source's tasks, from the first.")] = 1,
    split: shared.SplitOption = "train",
    seed: shared.SeedOption = 0,
    option: shared.HarnessOptions = None,
    sandbox: shared.SandboxOption = "local",
    sandbox_option: shared.SandboxOptions = None,
    matcher: shared.MatcherOption = None,
    policy: shared.PolicyOption = None,
    temperature: shared.TemperatureOption = None,
    max_tokens: shared.MaxTokensOption = None,
    turns: shared.TurnsOption = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show each trajectory token by token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Let an agent attempt a task; show its turns, reward, trajectories and mismatches.

    Exits with status 1 when an attempt failed; one that ran into a limit counts as failed. The sessions of a
    gateway that was named by --gateway are kept. `titogym eval` measures many tasks at once.
    """
    from titogym.gateway.client import GatewayClient
    from titogym.harnesses.registry import harness as make_harness

    shared.end_on_sigterm()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("titogym").setLevel(logging.INFO)
    tasks = shared.find_tasks(source, split=split, seed=seed, count=count, turns=turns, sandbox=sandbox)
    agent = make_harness(harness, **shared.key_values(option or []))
    backend = shared.sandbox_backend(sandbox, sandbox_option or [], "titogym-run")
    session = shared.session_options(policy, matcher, temperature, max_tokens)

    async def run(url: str, key: str | None) -> list[Attempt]:
        async with GatewayClient(url, key) as client:
            await shared.require_ready(client, url)
            return await _run(tasks * attempts, agent, backend, client, session)

    with shared.serving(engine, gateway, admin_key, model_dir, family) as (url, key):
        made = asyncio.run(run(url, key))
    if as_json:
        typer.echo(json.dumps(_plain(tasks, harness, made), default=_encode))
    else:
        _tell(made, tokens=tokens, gateway=gateway)
    if any(attempt.result.failed for attempt in made):
        raise typer.Exit(1)


async def _run(
    tasks: "Sequence[Task]",
    agent: "Harness",
    backend: "SandboxBackend",
    client: "GatewayClient",
    session: dict[str, Any],
) -> list[Attempt]:
    """One attempt for each of `tasks`, in which a task may stand several times."""
    from titogym.harnesses.episode import run_episode

    places = asyncio.Semaphore(AT_ONCE)

    async def attempt(task: "Task", number: int) -> Attempt:
        async with places:
            result = await run_episode(
                task,
                harness=agent,
                backend=backend,
                gateway=client,
                session_options=session,
                labels={"attempt": str(number)},
                keep_session=True,
            )
        return await _told(result, client)

    try:
        await agent.prepare()
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(attempt(task, number)) for number, task in enumerate(tasks)]
    finally:
        await agent.close()
        await backend.close()
    return sorted((task.result() for task in running), key=lambda made: _place(tasks, made))


def _place(tasks: "Sequence[Task]", made: Attempt) -> int:
    return next(place for place, task in enumerate(tasks) if task.id == made.result.task_id)


async def _told(result: "EpisodeResult", client: "GatewayClient") -> Attempt:
    from titogym.gateway.client import GatewayError

    if result.session_id is None:
        return Attempt(result, [], [])
    try:
        return Attempt(
            result, await client.turns(result.session_id), await client.token_texts(result.session_id)
        )
    except GatewayError:  # the result says so already
        return Attempt(result, [], [])


def _tell(attempts: Sequence[Attempt], *, tokens: bool, gateway: str | None) -> None:
    from rich.console import Console
    from rich.text import Text

    from titogym.cli.control import visible
    from titogym.cli.session import colours, token_view
    from titogym.cli.transcript import print_result, print_turns

    console = Console(highlight=False)
    for number, attempt in enumerate(attempts, 1):
        console.rule(f"{attempt.result.task_id}, attempt {number} of {len(attempts)}")
        print_turns(console, attempt.turns)
        if attempt.result.failed and attempt.result.log:
            console.print(Text(f"The end of the agent's own output:\n{visible(attempt.result.log[-2000:])}"))
        print_result(console, attempt.result)
        if tokens:
            for trajectory, texts in attempt.texts:
                console.print(f"trajectory to turn {trajectory.leaf}, token by token:")
                console.print(token_view(trajectory, texts, colours=colours(console)))
        session = attempt.result.session_id
        if gateway is not None and session is not None:
            closer = f"titogym session inspect {session} --tokens --gateway {gateway}"
            console.print(f"look closer: {closer}", soft_wrap=True)
    console.rule()
    rewards = [attempt.result.reward for attempt in attempts if attempt.result.reward is not None]
    if len(attempts) > 1 and rewards:
        mean = sum(rewards) / len(rewards)
        console.print(f"mean reward {mean:.3f} over {len(rewards)} graded of {len(attempts)} attempts")
    if gateway is None and not tokens:
        console.print("look closer: the same command with --tokens shows every token, with --json everything")


def _plain(tasks: "Sequence[Task]", harness: str, attempts: Sequence[Attempt]) -> dict[str, Any]:
    return {
        "tasks": [task.id for task in tasks],
        "harness": harness,
        "attempts": [
            {**asdict(attempt.result), "failed": attempt.result.failed, "messages": attempt.turns}
            for attempt in attempts
        ],
    }


def _encode(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} in a result")
