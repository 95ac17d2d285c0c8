"""`titogym doctor`: find out whether a harness can be trained as it is."""

import asyncio
import json
import logging
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from titogym.harnesses.base import Harness
    from titogym.harnesses.doctor import Report
    from titogym.harnesses.examination import HostCommand

command = typer.Typer(help="Find out whether a harness can be trained as it is.", no_args_is_help=True)


@command.callback()
def _group() -> None:
    pass


@command.command(
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True}, no_args_is_help=True
)
def harness(
    words: Annotated[
        list[str],
        typer.Argument(metavar="CMD...", help="Name, file or dotted path of a harness, or any command line."),
    ],
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="KEY=VALUE for a named harness; VALUE is JSON or plain text."),
    ] = None,
    matcher: Annotated[
        str | None, typer.Option(help="Judge by this matcher; default: the harness's own, or what it needs.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Longest run of the harness.")] = 180.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a real harness against a scripted model on this machine, and tell what it does.

    A command finds its model by OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, ANTHROPIC_BASE_URL and so
    on, or by `{base_url}`, `{api_key}`, `{model}` and `{instruction}` among its words. It runs as you, in
    an empty directory; the model asks for nothing but `echo`. A named harness runs in its sandbox, where
    the model also has it write a file and send a sub-agent.

    Exits with status 1 when its sessions would not train token-exact.
    """
    from titogym.gateway.sessions.matchers import matcher as find_matcher
    from titogym.harnesses.doctor import diagnose
    from titogym.harnesses.examination import examine

    if matcher is not None:
        find_matcher(matcher)  # says which there are
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("titogym.harnesses").setLevel(logging.INFO)  # what is being installed
    agent = _agent(words, option or [])
    report = diagnose(asyncio.run(examine(agent, seconds=seconds)), matcher)
    if as_json:
        typer.echo(json.dumps({**asdict(report), "token_exact": report.token_exact}, indent=2))
    else:
        from rich.console import Console

        _tell(Console(highlight=False), report)
    if not report.token_exact:
        raise typer.Exit(1)


def _agent(words: list[str], options: list[str]) -> "Harness | HostCommand":
    from titogym.cli.attempting import key_values
    from titogym.errors import UserError
    from titogym.harnesses.examination import HostCommand
    from titogym.harnesses.registry import harness as make_harness
    from titogym.harnesses.registry import names

    name = words[0]
    dotted = ":" in name and " " not in name and "/" not in name
    if name in names() or dotted or name.endswith(".toml"):
        if len(words) > 1:
            raise UserError(f"Put what belongs to the harness {name} before its name: -o KEY=VALUE {name}.")
        return make_harness(name, **key_values(options))
    if options:
        raise UserError(f"Options are for a named harness ({', '.join(names())}), not for a command.")
    try:
        line = words if len(words) > 1 else shlex.split(name)
    except ValueError as error:
        raise UserError(f"The command {name!r} cannot be split into words: {error}.") from error
    # It runs elsewhere: what names a file here must still name it there.
    return HostCommand([os.path.abspath(word) if os.path.exists(word) else word for word in line])


def _tell(console: "Console", report: "Report") -> None:
    from rich.text import Text

    ended = f"{report.outcome}{f': {report.detail}' if report.detail else ''}"
    console.print(Text(f"{report.harness}: {report.turns} turns in {report.seconds:.1f} s, {ended}"))
    if report.outcome == "crashed" and report.log:
        console.print(Text(f"The end of its output:\n{report.log[-1500:]}", "dim"))
    if report.endpoints:
        _tell_wire(console, report)
    if report.turns:
        _tell_history(console, report)
    if report.token_exact:
        policy = "linear" if report.matchers[report.used].refused == 0 else "branching"
        console.print(
            Text(f"Trains token-exact with matcher {report.used!r}, policy {policy!r}.", "bold green")
        )
        return
    console.print(Text("Does not train token-exact:", "bold red"))
    for problem in report.problems:
        console.print(Text(f"- {problem}", "red"))


def _tell_wire(console: "Console", report: "Report") -> None:
    from rich.text import Text

    rows = [
        (
            f"{one['method']} {one['path']}",
            one["protocol"] or "-",
            str(one["requests"]),
            ", ".join(f"{count} × {status}" for status, count in one["statuses"].items()),
        )
        for one in report.endpoints
    ]
    _table(console, "What it asks", ("endpoint", "protocol", "requests", "statuses"), rows)
    console.print(f"streams: {report.streaming}; repeated requests: {report.retried}")
    fields = [(one["name"], one["fate"], one["example"], one["reason"]) for one in report.fields]
    _table(console, "Fields that it sends", ("field", "fate", "example", "reason"), fields)
    for refusal in report.refusals:
        told = f"refused {refusal['requests']} × {refusal['path']}: {refusal['message']}"
        console.print(Text(told, "yellow"))


def _tell_history(console: "Console", report: "Report") -> None:
    from rich.text import Text

    sides = ("held", "sent back")
    if report.rewrites:
        changed = [(f"{one.field} ({one.answers} answers)", one.held, one.sent) for one in report.rewrites]
        _table(console, "How answers come back", ("field", *sides), changed)
    else:
        console.print("Every answer that it sends back is as it was given.")
    if report.lost:
        lost = [(f"turn {one.node}, {one.field}", one.held, one.sent) for one in report.lost[:8]]
        _table(console, f"Turns that lose their history under {report.used}", ("where", *sides), lost)
    for what, asked in (("side requests", report.side_requests), ("sub-agents", report.sub_agents)):
        if asked:
            console.print(Text(f"{what}: {len(asked)}, such as {asked[0]!r}"))
    if report.taken_back:
        console.print(f"answers dropped and asked for again: {report.taken_back}")
    marks = {report.used: " (judged by)", report.needs: " (needed)"}
    fates = [
        (f"{name}{marks.get(name, '')}", f"{fate.lost} of {report.turns}", str(fate.roots), str(fate.refused))
        for name, fate in report.matchers.items()
    ]
    columns = ("matcher", "lose their history", "conversations", "refused if linear")
    _table(console, "Matchers", columns, fates)
    for cause, count in report.mismatches.items():
        console.print(Text(f"tito_session_mismatch: {count} × {cause}"))
    console.print(
        f"{report.prompts_in_rows} of {report.prompts} prompts stand in the session's rows to the token; "
        f"{report.trained_tokens} of {report.sampled_tokens} sampled tokens carry loss"
    )


def _table(console: "Console", title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
