"""`titogym quickstart`: the whole loop on this machine, in minutes."""

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from titogym.errors import UserError, install_extra


def command(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Where to put model and run.  [default: runs/quickstart-DATE-TIME]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of model, tasks and training.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the quickstart in --dir from its last checkpoint.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override one key of the configuration: run.steps=40."
        ),
    ] = None,
) -> None:
    """Build a small chat model, then train it on terminal tasks: about ten minutes on two CPU cores.

    Makes a tokenizer and a Qwen3 model of 1 M parameters by supervised fine-tuning, starts SGLang and the
    gateway, and runs asynchronous GRPO on generated tasks in local sandboxes. Ends with a table, a reward
    plot, an HTML report and the command that opens a trajectory token by token.
    """
    try:
        from titogym.quickstart.run import quickstart, resume_command
    except ModuleNotFoundError as missing:
        raise UserError(
            f"The quickstart trains, and {missing.name} is not installed: {install_extra('train')}."
        ) from None

    if resume and directory is None:
        raise UserError("--resume needs --dir: the folder of the quickstart to continue.")
    directory = directory or Path("runs") / time.strftime("quickstart-%Y%m%d-%H%M%S")
    console = Console()
    try:
        quickstart(directory, seed=seed, resume=resume, overrides=overrides or [], console=console)
    except (KeyboardInterrupt, asyncio.CancelledError) as stopped:
        console.print(
            f"Stopped. Continue with: {resume_command(directory, seed, overrides or [])}",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(130 if isinstance(stopped, KeyboardInterrupt) else 143) from None
