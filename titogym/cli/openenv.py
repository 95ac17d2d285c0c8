"""`titogym env serve`: our tasks for clients of OpenEnv."""

import typer
from rich.console import Console

from titogym.cli.attempting import SandboxOptions, key_values
from titogym.envs import registry
from titogym.envs.openenv import server
from titogym.envs.sandboxes.registry import backend as sandbox_backend

_console = Console()


def serve(
    source: str = typer.Argument(
        help="Tasks: a directory, 'starter' or a generator, with ?key=value options."
    ),
    split: str = typer.Option("train", help="Which of a generator's tasks."),
    seed: int = typer.Option(0, help="Seed of a generator."),
    count: int | None = typer.Option(None, min=1, help="How many tasks."),
    host: str = typer.Option("127.0.0.1", help="Address to listen at."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port; 0 lets the system choose."),
    sessions: int = typer.Option(16, min=1, help="How many clients are served at once."),
    sandbox: str = typer.Option("local", help="Where tasks run: local, docker, daytona, or a dotted path."),
    sandbox_option: SandboxOptions = None,
) -> None:
    """Serve tasks to clients of OpenEnv (needs the extra openenv)."""
    server.serve(
        registry.tasks(source, split=split, seed=seed, count=count),
        sandbox_backend(sandbox, **{"labels": {"run": "openenv"}, **key_values(sandbox_option or [])}),
        host=host,
        port=port,
        sessions=sessions,
        report=lambda url: _console.print(f"OpenEnv server at {url}", soft_wrap=True),
    )
