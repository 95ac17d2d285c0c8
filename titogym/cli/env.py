"""`titogym env`: what environments there are, whether task directories are sound, what was left behind."""

import asyncio
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from titogym.envs import checking, registry
from titogym.envs.sandboxes.base import Reaped, SandboxBackend
from titogym.envs.sandboxes.registry import backend as sandbox_backend
from titogym.envs.terminal_bench import load_task
from titogym.errors import UserError
from titogym.scratch import sweep

command = typer.Typer(
    help="List environments, check task directories, clean up sandboxes.", no_args_is_help=True
)
_console = Console()


@command.command("list")
def list_environments() -> None:
    """Show the environments, the task generators and the task directories that come with titogym."""
    table = Table(title="Environments and tasks", title_justify="left")
    for heading in ("name", "kind", "what it is"):
        table.add_column(heading, overflow="fold")
    for name, target in sorted(registry.environments().items()):
        table.add_row(name, "environment", target)
    for name, target in sorted(registry.generators().items()):
        table.add_row(name, "task generator", target)
    for directory in registry.task_directories(registry.STARTER):
        table.add_row(directory.name, "task directory", str(load_task(directory).metadata["description"]))
    _console.print(table)
    _console.print(
        f"The task directories are in {registry.STARTER}; all of them together are called 'starter'."
    )


@command.command()
def check(
    source: str = typer.Argument(metavar="DIR", help="A task directory, a directory of them, or 'starter'."),
    repeats: int = typer.Option(3, min=1, help="How often each is tried; results that differ are flaky."),
    parallel: int = typer.Option(4, min=1, help="How many sandboxes run at once."),
    sandbox: str = typer.Option("local", help="Where they run: local, docker, daytona, or a dotted path."),
) -> None:
    """Check that the solution of every task scores 1 and doing nothing scores 0, every time."""
    directory = registry.STARTER if source == "starter" else Path(source)
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory.")
    directories = registry.task_directories(directory)
    with Progress(console=_console, transient=True) as progress:
        bar = progress.add_task("checking", total=len(directories) * 2 * repeats)
        backend = sandbox_backend(sandbox)

        async def check_all() -> list[checking.Report]:
            try:
                return await checking.check_all(
                    directories, backend, repeats, parallel, lambda: progress.advance(bar)
                )
            finally:
                await backend.close()

        reports = asyncio.run(check_all())
    table = Table()
    for heading in ("task", "solution", "doing nothing", "verdict"):
        table.add_column(heading, overflow="fold")
    for report in reports:
        colour = "green" if report.sound else "red"
        table.add_row(
            report.name,
            report.solution.summary,
            report.nothing.summary,
            f"[{colour}]{report.verdict}[/{colour}]",
        )
    _console.print(table)
    unsound = [report.name for report in reports if not report.sound]
    if unsound:
        _console.print(
            f"{len(unsound)} of {len(reports)} tasks are not sound: {', '.join(unsound)}", style="red"
        )
        raise typer.Exit(1)
    _console.print(f"All {len(reports)} tasks are sound.", style="green")


@command.command()
def reap(
    sandbox: list[str] = typer.Option(["local"], help="Which sandboxes: local, docker, daytona; repeatable."),
) -> None:
    """Destroy the sandboxes that drivers left behind when they were killed."""
    failed = False
    for name in sandbox:
        done = asyncio.run(_reap(sandbox_backend(name)))
        for leftover, reason in done.failed.items():
            failed = True
            _console.print(f"could not destroy {leftover}: {reason}", style="red")
        _console.print(f"{name}: destroyed {len(done.destroyed)} leftovers of dead drivers.")
    if swept := sweep("titogym-run"):
        _console.print(f"Deleted {len(swept)} directories of dead runs.")
    if failed:
        raise typer.Exit(1)


async def _reap(backend: SandboxBackend) -> Reaped:
    try:
        return await backend.reap()
    finally:
        await backend.close()
