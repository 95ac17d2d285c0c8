"""`titogym env`: what environments there are, whether tasks are sound, a new one, what was left behind."""

import asyncio
import inspect
import sys
from pathlib import Path
from typing import Any, get_args

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from titogym.cli.attempting import SandboxOptions, key_values
from titogym.cli.openenv import serve
from titogym.cli.scaffold import scaffold
from titogym.cli.transcript import print_grade, print_messages
from titogym.envs import checking, registry
from titogym.envs.playing import Played, play
from titogym.envs.sandboxes.base import Reaped, SandboxBackend, SandboxError
from titogym.envs.sandboxes.registry import backend as sandbox_backend
from titogym.envs.task import GradingError
from titogym.envs.terminal_bench import load_task
from titogym.errors import UserError
from titogym.scratch import sweep

command = typer.Typer(
    help="List, check, play and begin environments; clean up sandboxes.", no_args_is_help=True
)
_console = Console()
command.command()(serve)


@command.command("list")
def list_environments() -> None:
    """Show the task generators with their options, the environments, and the tasks that come with titogym."""
    generators = Table("name", "options", "what it makes", title="Task generators", title_justify="left")
    for name, target in sorted(registry.generators().items()):
        options, about = _described(name, target)
        generators.add_row(name, Text(options), Text(about))
    _console.print(generators)
    environments = Table("name", "kind", "where", title="Environments", title_justify="left")
    for name, target in sorted(registry.environments().items()):
        environments.add_row(name, Text(_kind(name)), target)
    _console.print(environments)
    directories = Table("name", "what it asks", title="Task directories", title_justify="left")
    for directory in registry.task_directories(registry.STARTER):
        directories.add_row(directory.name, str(load_task(directory).metadata["description"]))
    _console.print(directories)
    _console.print(
        f"The task directories are in {registry.STARTER}; all of them together are called 'starter'. A "
        "generator takes its options as 'arithmetic?level=2&split=test'."
    )


def _described(name: str, target: str) -> tuple[str, str]:
    """A generator's own options with their defaults or choices, and the first line about it."""
    try:
        generate = registry.generator(name)
    except UserError as error:  # of another package, and broken
        return "", str(error)
    options = [
        _option(parameter)
        for parameter in inspect.signature(generate).parameters.values()
        if parameter.name not in ("split", "seed", "count") and parameter.kind is not parameter.VAR_KEYWORD
    ]
    module = inspect.getdoc(sys.modules[generate.__module__]) or ""
    return " ".join(options), (module.splitlines() or [target])[0]


def _option(parameter: inspect.Parameter) -> str:
    choices = get_args(parameter.annotation)
    if choices and all(isinstance(choice, int | str) for choice in choices):
        return f"{parameter.name}={'|'.join(map(str, choices))}"
    if parameter.default is parameter.empty:
        return f"{parameter.name}=..."
    return f"{parameter.name}={parameter.default if parameter.default not in ('', None) else ''}"


def _kind(name: str) -> str:
    try:
        made = registry.environment(name)
    except UserError as error:
        return str(error)
    sandbox = ", in a sandbox" if made.needs_sandbox else ""
    return ("turn by turn" if made.interactive else "the agent drives") + sandbox


SOURCE = typer.Argument(
    metavar="SOURCE",
    help="A task directory, a directory of them, 'starter', a .jsonl file, or a task generator with options "
    "as 'arithmetic?level=2&count=5'.",
)
SANDBOX = typer.Option("local", help="Where they run: local, docker, daytona, or a dotted path.")


@command.command()
def check(
    source: str = SOURCE,
    repeats: int = typer.Option(3, min=1, help="How often each is tried; results that differ are flaky."),
    parallel: int = typer.Option(4, min=1, help="How many attempts run at once."),
    sandbox: str = SANDBOX,
    sandbox_option: SandboxOptions = None,
) -> None:
    """Check that the solution of every task scores 1 and doing nothing scores 0, every time.

    The solution is solve.sh of terminal tasks and `reference` of interactive environments. A generator makes
    10 tasks if its options say no count.
    """
    directory = registry.directory(source)
    found = registry.task_directories(directory) if directory else registry.tasks(source, count=10)
    with Progress(console=_console, transient=True) as progress:
        bar = progress.add_task("checking", total=len(found) * 2 * repeats)
        backend = sandbox_backend(sandbox, **key_values(sandbox_option or []))

        async def check_all() -> list[checking.Report]:
            kind: Any = checking.check_all if directory else checking.check_tasks
            try:
                reports: list[checking.Report] = await kind(
                    found, backend, repeats, parallel, lambda: progress.advance(bar)
                )
            finally:
                await backend.close()
            return reports

        reports = asyncio.run(check_all())
    if reason := checking.obstacle(reports):
        number = "The task" if len(reports) == 1 else f"None of the {len(reports)} tasks"
        verb = "could not be checked" if len(reports) == 1 else "could be checked"
        _console.print(Text(f"{number} {verb}: {reason}", "red"), soft_wrap=True)
        raise typer.Exit(1)
    table = Table()
    for heading in ("task", "solution", "doing nothing", "verdict"):
        table.add_column(heading, overflow="fold")
    for report in reports:
        verdict = Text(report.verdict, "green" if report.sound else "red")
        table.add_row(Text(report.name), report.solution.summary, report.nothing.summary, verdict)
    _console.print(table)
    unsound = [report.name for report in reports if not report.sound]
    if unsound:
        _console.print(
            f"{len(unsound)} of {len(reports)} tasks are not sound: {', '.join(unsound)}", style="red"
        )
        raise typer.Exit(1)
    sound = "The task is" if len(reports) == 1 else f"All {len(reports)} tasks are"
    _console.print(f"{sound} sound.", style="green")


@command.command()
def run(
    source: str = SOURCE,
    nothing: bool = typer.Option(False, "--nothing", help="Do nothing, rather than play by the reference."),
    sandbox: str = SANDBOX,
    sandbox_option: SandboxOptions = None,
) -> None:
    """Play the first task of a source without a model, by its reference, and show what happens.

    `titogym run` lets a model play.
    """
    task = registry.tasks(source, count=1)[0]
    backend = sandbox_backend(sandbox, **key_values(sandbox_option or []))

    async def attempt() -> Played:
        try:
            return await play(task, "nothing" if nothing else "reference", backend)
        finally:
            await backend.close()

    try:
        played = asyncio.run(attempt())
    except (GradingError, SandboxError) as error:
        raise UserError(str(error)) from error
    _console.rule(Text(task.id))
    print_messages(_console, played.messages)
    print_grade(_console, played.grade.reward, played.grade.evidence)


@command.command()
def init(
    name: str = typer.Argument(help="Name of the package."),
    parent: Path = typer.Option(Path("."), "--in", help="The folder to make it in."),
) -> None:
    """Write a package with an environment, its tasks, a README and passing tests, to begin from."""
    for path in scaffold(name, parent):
        _console.print(f"  {path}", highlight=False, soft_wrap=True)
    then = f'cd {parent / name} && pip install -e ".[test]" && python -m pytest'
    _console.print(f"Now: {then}; its README says how to go on.", soft_wrap=True, markup=False)


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
