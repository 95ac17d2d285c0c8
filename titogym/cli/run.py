"""`titogym run`: attempts at one task, told turn by turn."""

import asyncio
import base64
import json
import logging
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from titogym.errors import UserError

if TYPE_CHECKING:
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
    task_dir: Annotated[Path, typer.Argument(help="Task directory: task.toml, instruction.md, tests/.")],
    harness: Annotated[
        str, typer.Option(help="The agent: openai_loop, mini_swe_agent, command, or a dotted path.")
    ] = "openai_loop",
    engine: Annotated[str | None, typer.Option(help="Base URL of an SGLang server.")] = None,
    gateway: Annotated[
        str | None,
        typer.Option(help="URL of a running gateway, in place of --engine; its sessions are kept."),
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="TITOGYM_ADMIN_KEY", help="Admin key of that gateway.")
    ] = None,
    model_dir: Annotated[
        Path | None, typer.Option(help="Model folder with tokenizer.json; default: the engine's own.")
    ] = None,
    family: Annotated[
        str | None, typer.Option(help="Template family; default: recognised from the folder.")
    ] = None,
    attempts: Annotated[int, typer.Option(min=1, help="How many episodes to run.")] = 1,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="KEY=VALUE for the harness; VALUE is JSON or plain text."),
    ] = None,
    matcher: Annotated[str | None, typer.Option(help="Session matcher; default: the harness's own.")] = None,
    policy: Annotated[str, typer.Option(help="Session policy: linear or branching.")] = "linear",
    temperature: Annotated[float | None, typer.Option(min=0, help="Force this temperature.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of one answer.")] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="Most turns; default: the task's.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show each trajectory token by token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Let an agent attempt a task in a sandbox; show its turns, reward, trajectories and mismatches.

    Exits with status 1 when an attempt failed; one that ran into a limit counts as failed.
    """
    from titogym.envs.terminal_bench import load_task
    from titogym.gateway.client import GatewayClient
    from titogym.harnesses.registry import harness as make_harness

    # So that SIGTERM cleans up as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("titogym").setLevel(logging.INFO)
    task = load_task(task_dir)
    if turns is not None:
        task = replace(task, limits=replace(task.limits, turns=turns))
    agent = make_harness(harness, **harness_options(option or []))
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    session: dict[str, Any] = {
        "policy": policy,
        "sampling": {name: value for name, value in sampling.items() if value is not None},
    }
    if matcher is not None:
        session["matcher"] = matcher

    async def run(url: str, key: str | None) -> list[Attempt]:
        async with GatewayClient(url, key) as client:
            if not await client.ready():
                raise UserError(f"The gateway at {url} does not answer, or has no engine that does.")
            return await _run(task, agent, client, session, attempts)

    if gateway is not None:
        if engine is not None:
            raise UserError("Give either --engine, for a gateway of the run's own, or --gateway, not both.")
        made = asyncio.run(run(gateway, admin_key))
    elif engine is not None:
        with _own_gateway(engine, model_dir, family) as (url, key):
            made = asyncio.run(run(url, key))
    else:
        raise UserError(
            "Say where the model is: --engine URL (`titogym engine MODEL` starts one) or --gateway URL."
        )
    if as_json:
        typer.echo(json.dumps(_plain(task, harness, made), default=_encode))
    else:
        _tell(task, made, tokens=tokens, gateway=gateway)
    if any(attempt.result.failed for attempt in made):
        raise typer.Exit(1)


def harness_options(words: Sequence[str]) -> dict[str, Any]:
    """Options of a harness from `KEY=VALUE` words. Raises `UserError`."""
    options = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise UserError(f"The option {word!r} is not of the form KEY=VALUE.")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


@contextmanager
def _own_gateway(engine: str, model_dir: Path | None, family: str | None) -> Iterator[tuple[str, str]]:
    """URL and admin key of a gateway that lives as long as the run."""
    from titogym.gateway.launch import launch
    from titogym.templates.model import load_model_assets

    served = asyncio.run(_model_path(engine))
    if model_dir is None:
        model_dir = Path(served)
        if not model_dir.is_dir():
            raise UserError(
                f"The engine serves {served}, which is no folder on this machine: give --model-dir with the "
                "folder that holds its tokenizer.json."
            )
    load_model_assets(model_dir, family)  # says in one sentence what is wrong with them
    with tempfile.TemporaryDirectory(prefix="titogym-run-") as directory:
        process = launch([engine], model_dir, directory=Path(directory), family=family)
        try:
            yield process.url, process.admin_key
        finally:
            process.stop()


async def _model_path(url: str) -> str:
    from titogym.gateway.engines.base import EngineError
    from titogym.gateway.engines.sglang import SGLangEngine

    engine = SGLangEngine(url)
    try:
        return (await engine.info()).model_path
    except EngineError as error:
        raise UserError(
            f"No SGLang engine answers at {url} ({error}): start one with `titogym engine MODEL`."
        ) from None
    finally:
        await engine.close()


async def _run(
    task: "Task", agent: "Harness", client: "GatewayClient", session: dict[str, Any], count: int
) -> list[Attempt]:
    from titogym.envs.sandboxes.local import LocalBackend
    from titogym.harnesses.episode import run_episode

    backend = LocalBackend()
    places = asyncio.Semaphore(AT_ONCE)

    async def attempt(number: int) -> Attempt:
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

    await agent.prepare()
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(attempt(number)) for number in range(count)]
    finally:
        await agent.close()
    return [task.result() for task in running]


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


def _tell(task: "Task", attempts: Sequence[Attempt], *, tokens: bool, gateway: str | None) -> None:
    from rich.console import Console
    from rich.text import Text

    from titogym.cli.control import visible
    from titogym.cli.session import token_view
    from titogym.cli.transcript import print_result, print_turns

    console = Console(highlight=False)
    for number, attempt in enumerate(attempts, 1):
        console.rule(f"{task.id}, attempt {number} of {len(attempts)}")
        print_turns(console, attempt.turns)
        if attempt.result.failed and attempt.result.log:
            console.print(Text(f"The end of the agent's own output:\n{visible(attempt.result.log[-2000:])}"))
        print_result(console, attempt.result)
        if tokens:
            for trajectory, texts in attempt.texts:
                console.print(f"trajectory to turn {trajectory.leaf}, token by token:")
                console.print(token_view(trajectory, texts))
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


def _plain(task: "Task", harness: str, attempts: Sequence[Attempt]) -> dict[str, Any]:
    return {
        "task": task.id,
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
