"""What `titogym run` and `titogym eval` share: their options, and the gateway that the agents talk to."""

import asyncio
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from titogym import options
from titogym.errors import UserError

if TYPE_CHECKING:
    from titogym.envs.sandboxes.base import SandboxBackend
    from titogym.envs.task import Task
    from titogym.gateway.client import GatewayClient

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A task directory, a directory of them, a .jsonl file of questions, `starter`, or a task "
        "generator of `titogym env list` (or a dotted path), with options as in `arithmetic?level=2`.",
    ),
]
HarnessOption = Annotated[
    str, typer.Option(help="The agent: openai_loop, mini_swe_agent, command, ..., or a dotted path.")
]
EngineOption = Annotated[str | None, typer.Option(help="Base URL of an SGLang server.")]
GatewayOption = Annotated[str | None, typer.Option(help="URL of a running gateway, in place of --engine.")]
KeyOption = Annotated[str | None, typer.Option(envvar="TITOGYM_ADMIN_KEY", help="Admin key of that gateway.")]
ModelOption = Annotated[
    Path | None, typer.Option(help="Model folder with tokenizer.json; default: the engine's own.")
]
FamilyOption = Annotated[
    str | None, typer.Option(help="Template family; default: recognised from the folder.")
]
HarnessOptions = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="KEY=VALUE for the harness; VALUE is JSON or plain text."),
]
SandboxOption = Annotated[
    str, typer.Option(help="Where sandboxes run: local, docker, daytona, or a dotted path.")
]
SandboxOptions = Annotated[
    list[str] | None,
    typer.Option(help="KEY=VALUE for the sandbox backend; VALUE is JSON or plain text."),
]
MatcherOption = Annotated[str | None, typer.Option(help="Session matcher; default: the harness's own.")]
PolicyOption = Annotated[
    str | None, typer.Option(help="Session policy, linear or branching; default: the harness's own.")
]
TemperatureOption = Annotated[float | None, typer.Option(min=0, help="Force this temperature.")]
MaxTokensOption = Annotated[int | None, typer.Option(min=1, help="Most tokens of one answer.")]
TurnsOption = Annotated[int | None, typer.Option(min=1, help="Most turns; default: the task's.")]
SplitOption = Annotated[str, typer.Option(help="Split of a task generator.")]
SeedOption = Annotated[int, typer.Option(help="Seed of a task generator.")]


def find_tasks(
    source: str, *, split: str, seed: int, count: int | None, turns: int | None, sandbox: str | None = None
) -> "list[Task]":
    """The tasks of a source, each under `turns` if given.

    Raises `UserError`, also for those that `sandbox` has no images for.
    """
    from titogym.envs.registry import tasks
    from titogym.envs.terminal_bench import need_images

    found = tasks(source, split=split, seed=seed, count=count)
    if sandbox == "local" and (needing := need_images(found)):
        task, reason = needing[0]
        raise UserError(
            f"{len(needing)} of {len(found)} tasks need images, which the local sandbox does not have: "
            f"choose --sandbox docker or daytona. The first is {task.id}: {reason}."
        )
    if turns is None:
        return found
    return [replace(task, limits=replace(task.limits, turns=turns)) for task in found]


def key_values(words: Sequence[str]) -> dict[str, Any]:
    """Options from `KEY=VALUE` words. Raises `UserError`."""
    return dict(options.pair(word) for word in words)


def sandbox_backend(name: str, words: Sequence[str], run: str) -> "SandboxBackend":
    """The sandbox backend of this name, whose sandboxes bear the run's name."""
    from titogym.envs.sandboxes.registry import backend

    return backend(name, **{"labels": {"run": run}, **key_values(words)})


def session_options(
    policy: str | None, matcher: str | None, temperature: float | None, max_tokens: int | None
) -> dict[str, Any]:
    """What the gateway is asked of every session, whatever the harness is."""
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    given = {"policy": policy, "matcher": matcher}
    return {
        "sampling": {name: value for name, value in sampling.items() if value is not None},
        **{name: value for name, value in given.items() if value is not None},
    }


def end_on_sigterm() -> None:
    """SIGTERM cleans up as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@contextmanager
def serving(
    engine: str | None, gateway: str | None, admin_key: str | None, model_dir: Path | None, family: str | None
) -> Iterator[tuple[str, str | None]]:
    """URL and admin key of the gateway that was named, or of one that lives as long as the context."""
    if gateway is not None:
        if engine is not None:
            raise UserError("Give either --engine, for a gateway of the run's own, or --gateway, not both.")
        yield gateway, admin_key
    elif engine is not None:
        with _own_gateway(engine, model_dir, family) as (url, key):
            yield url, key
    else:
        raise UserError(
            "Say where the model is: --engine URL (`titogym engine MODEL` starts one) or --gateway URL."
        )


async def require_ready(client: "GatewayClient", url: str) -> None:
    """Raises `UserError` for a gateway that can serve nobody."""
    if not await client.ready():
        raise UserError(f"The gateway at {url} does not answer, or has no engine that does.")


@contextmanager
def _own_gateway(engine: str, model_dir: Path | None, family: str | None) -> Iterator[tuple[str, str]]:
    from titogym.gateway.launch import launch
    from titogym.scratch import scratch_directory
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
    with scratch_directory("titogym-run") as directory:
        process = launch([engine], model_dir, directory=directory, family=family)
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
