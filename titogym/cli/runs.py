"""`titogym runs`: the runs on this disk, side by side or live."""

import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from titogym.cli.tables import print_table
from titogym.errors import UserError
from titogym.trainer.runs.directory import RunDirectory

command = typer.Typer(help="List, compare and watch training runs.", no_args_is_help=True)

_RunDir = Annotated[
    Path, typer.Argument(help="Run directory of `titogym train` or `titogym quickstart`.", metavar="DIR")
]


@command.command("list")
def list_runs(
    directory: Annotated[
        Path, typer.Argument(help="Where to look, folders in folders included.", metavar="DIR")
    ] = Path("runs"),
) -> None:
    """One line per run below DIR, newest first."""
    from titogym.trainer.pages.report import summarise

    found = [path.parent for path in directory.rglob("config.json") if _is_run(path.parent)]
    if not found:
        raise UserError(f"There is no run in {directory}: give the directory that holds them.")
    table = Table("run", "started", "steps", "held-out before", "after", "reward in training", "state")
    for path in sorted(found, key=lambda path: -(path / "config.json").stat().st_mtime):
        run = RunDirectory(path)
        started = datetime.fromtimestamp((path / "config.json").stat().st_mtime).strftime("%Y-%m-%d %H:%M")
        try:
            summary = summarise(run)
        except UserError as damaged:  # which says nothing about the others
            table.add_row(str(path), started, "", "", "", "", str(damaged))
            continue
        table.add_row(
            str(path),
            started,
            f"{summary.steps} of {run.config()['run']['steps']}",
            _number(summary.before),
            _number(summary.after),
            _number(summary.last_reward),
            run.state(),
        )
    print_table(Console(), table, "run")


@command.command("compare")
def compare(
    directories: Annotated[list[Path], typer.Argument(help="Two or more run directories.", metavar="DIR...")],
) -> None:
    """What runs came to, and where their configurations differ."""
    from titogym.trainer.runs.comparison import differences, results

    runs = [_run(path) for path in directories]
    if len(runs) < 2:
        raise UserError("Give at least two run directories to compare.")
    console = Console()
    for title, rows in (
        ("What they came to", results(runs)),
        ("Where their configurations differ", differences([run.config() for run in runs])),
    ):
        if rows:
            table = Table("", *(str(path) for path in directories), title=title)
            for name, values in rows:
                table.add_row(name, *values)
            console.print(table)
        else:
            console.print(f"{title}: nowhere.")


@command.command("watch")
def watch(
    directory: _RunDir,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.")] = 0,
) -> None:
    """Serve a page that follows a run, running or ended, and Prometheus metrics at /metrics."""
    from titogym.trainer.pages.live import serving

    with serving(_run(directory), port) as url:
        typer.echo(f"Watch {directory} at {url} (Ctrl-C ends it)")
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            return


def _run(path: Path) -> RunDirectory:
    if not _is_run(path) and _is_run(path / "run"):
        path /= "run"  # the folder of a quickstart holds its model beside its run
    run = RunDirectory(path)
    run.config()
    return run


def _is_run(path: Path) -> bool:
    return (path / "config.json").is_file() and (path / "versions.json").is_file()


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}"
