"""The quickstart: a model from nothing, and the whole loop on it."""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from titogym.errors import UserError
from titogym.gateway.engines.environment import engine_python
from titogym.processes import program
from titogym.quickstart.model import prepare_model
from titogym.trainer.config.file import load_config
from titogym.trainer.config.sections import RunConfig
from titogym.trainer.pages import report
from titogym.trainer.training import run_training

CONFIG = Path(__file__).with_name("config.toml")


def quickstart(
    directory: Path, *, seed: int, resume: bool, overrides: Sequence[str], console: Console
) -> None:
    """Make the start model in `directory`/model and train it in `directory`/run.

    Without `resume`, `directory` must not hold a quickstart yet. Call from the main thread. Raises
    `UserError` when something cannot start or go on.
    """
    model_dir = directory / "model"
    config = _config(directory, model_dir, seed, overrides)
    if not resume and directory.exists() and any(directory.iterdir()):
        raise UserError(
            f"{directory} is not empty: give another --dir, or continue what is there with --resume."
        )
    with _spinner(console) as progress:
        line = progress.add_task("", total=None)

        def report_line(text: str) -> None:
            progress.update(line, description=text)
            if not console.is_terminal:
                console.print(text, highlight=False, soft_wrap=True)

        engine_python(report=report_line)  # its installation is no part of the run's ten minutes
        if not (model_dir / "model.safetensors").exists():
            started = time.monotonic()
            model_dir.mkdir(parents=True, exist_ok=True)
            prepare_model(model_dir, seed, report_line)
            console.print(
                f"Start model made in {time.monotonic() - started:.0f} s: {model_dir}", highlight=False
            )
    run = run_training(config, console, resume=resume and config.run.dir.exists())
    report.finish(run, console)


def resume_command(directory: Path, seed: int, overrides: Sequence[str]) -> str:
    """The command line that continues an interrupted quickstart."""
    sets = [word for override in overrides for word in ("--set", override)]
    return shlex.join(
        [program(), "quickstart", "--dir", str(directory), "--seed", str(seed), *sets, "--resume"]
    )


def _config(directory: Path, model_dir: Path, seed: int, overrides: Sequence[str]) -> RunConfig:
    own = [
        f"run.dir={directory / 'run'}",
        f"run.seed={seed}",
        f"model.dir={model_dir}",
        f"environment.seed={seed}",
    ]
    return load_config(CONFIG, [*own, *overrides])


def _spinner(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
