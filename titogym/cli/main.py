"""Entry point: registers the subcommands and turns `UserError` into one sentence and status 2."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer

from titogym import __version__
from titogym.errors import UserError

# command name -> module of titogym.cli that defines `command`
COMMANDS = {
    "quickstart": "quickstart",
    "run": "run",
    "eval": "eval",
    "train": "train",
    "runs": "runs",
    "show": "show",
    "engine": "engine",
    "serve": "serve",
    "verify-template": "verify_template",
    "session": "session",
    "doctor": "doctor",
    "env": "env",
}


def _version(value: bool) -> None:
    if value:
        typer.echo(f"titogym {__version__}")
        raise typer.Exit


class _Cli(typer.Typer):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except UserError as error:
            typer.secho(f"titogym: {error}", fg=typer.colors.RED, err=True)
            sys.exit(2)


app = _Cli(
    name="titogym",
    help="Train LLM agents on the exact tokens they sampled. Start with: titogym quickstart",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _main(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def _register() -> None:
    for name, module_name in COMMANDS.items():
        command: Callable[..., Any] | typer.Typer = import_module(f"titogym.cli.{module_name}").command
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)


_register()
