"""`titogym train`: asynchronous reinforcement learning from one TOML file."""

import asyncio
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from titogym.errors import UserError, install_extra
from titogym.processes import program


def command(
    config: Annotated[
        Path | None, typer.Argument(help="Configuration in TOML; docs/configuration.md lists every key.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in run.dir from its last checkpoint.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override one key, for example rollout.temperature=0.7."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the configuration and what it names.")
    ] = False,
    print_config_reference: Annotated[
        bool, typer.Option("--print-config-reference", help="Print every key with its meaning, as Markdown.")
    ] = False,
) -> None:
    """Train a model on tasks: rollouts and optimizer steps run at the same time, or take turns (run.driver).

    Starts an engine, a gateway and a trainer, shows one line per step, and leaves metrics, checkpoints, the
    trained model, a reward plot and an HTML report in run.dir. Stop it with Ctrl-C and go on with --resume.
    """
    from titogym.trainer.config.file import load_config

    if print_config_reference:
        from titogym.trainer.config.reference import reference

        typer.echo(reference(), nl=False)
        return
    if config is None:
        raise typer.BadParameter("give a configuration file", param_hint="CONFIG")
    loaded = load_config(config, overrides or [])
    try:
        from titogym.trainer.pages import report
        from titogym.trainer.training import prepare, run_training
    except ModuleNotFoundError as error:
        raise UserError(
            f"Training needs the package {error.name}: install it with {install_extra('train')}."
        ) from None

    if check:
        prepare(loaded)
        typer.echo(f"{config} is a valid configuration, and all that it names is there.")
        return
    console = Console()
    try:
        run = run_training(loaded, console, resume=resume)
    except (KeyboardInterrupt, asyncio.CancelledError) as stopped:
        sets = [word for override in overrides or [] for word in ("--set", override)]
        again = shlex.join([program(), "train", str(config), "--resume", *sets])
        console.print(
            f"Stopped. Continue from the last checkpoint with: {again}", highlight=False, soft_wrap=True
        )
        raise typer.Exit(130 if isinstance(stopped, KeyboardInterrupt) else 143) from None
    report.finish(run, console)
