"""`titogym doctor`: find out whether a harness can be trained as it is."""

import asyncio
import json
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

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
        typer.Argument(metavar="CMD...", help="Name or dotted path of a harness, or any command line."),
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
    an empty directory; the model asks for nothing but `echo`. A named harness runs in its sandbox.

    Exits with status 1 when its sessions would not train token-exact.
    """
    from titogym.gateway.sessions.matchers import matcher as find_matcher
    from titogym.harnesses.doctor import diagnose
    from titogym.harnesses.examination import examine

    if matcher is not None:
        find_matcher(matcher)  # says which there are
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
    from titogym.cli.run import harness_options
    from titogym.errors import UserError
    from titogym.harnesses.examination import HostCommand
    from titogym.harnesses.registry import harness as make_harness
    from titogym.harnesses.registry import names

    name = words[0]
    dotted = ":" in name and " " not in name and "/" not in name
    if name in names() or dotted:
        if len(words) > 1:
            raise UserError(f"Put what belongs to the harness {name} before its name: -o KEY=VALUE {name}.")
        return make_harness(name, **harness_options(options))
    if options:
        raise UserError(f"Options are for a named harness ({', '.join(names())}), not for a command.")
    try:
        return HostCommand(words if len(words) > 1 else shlex.split(name))
    except ValueError as error:
        raise UserError(f"The command {name!r} cannot be split into words: {error}.") from error


def _tell(console: "Console", report: "Report") -> None:
    from rich.table import Table
    from rich.text import Text

    ended = f"{report.outcome}{f': {report.detail}' if report.detail else ''}"
    console.print(Text(f"{report.harness}: {report.turns} turns in {report.seconds:.1f} s, {ended}"))

    table = Table("endpoint", "protocol", "requests", "statuses", title="What it asks", title_justify="left")
    for one in report.endpoints:
        statuses = ", ".join(f"{count} × {status}" for status, count in one["statuses"].items())
        table.add_row(
            f"{one['method']} {one['path']}", one["protocol"] or "-", str(one["requests"]), Text(statuses)
        )
    console.print(table)
    console.print(f"streams: {report.streaming}; repeated requests: {report.retried}")

    table = Table("field", "fate", "example", "reason", title="Fields that it sends", title_justify="left")
    for one in report.fields:
        style = {"heeded": "", "ignored": "yellow", "refused": "red"}[one["fate"]]
        table.add_row(Text(one["name"]), Text(one["fate"], style), Text(one["example"]), Text(one["reason"]))
    console.print(table)
    for refusal in report.refusals:
        console.print(
            Text(f"refused {refusal['requests']} × {refusal['path']}: {refusal['message']}", "yellow")
        )

    if report.rewrites:
        _differences(
            console,
            "How answers come back",
            "field",
            [(f"{one.field} ({one.answers} answers)", one.held, one.sent) for one in report.rewrites],
        )
    else:
        console.print("Every answer comes back as it was given.")
    if report.lost:
        lost = [(f"turn {one.node}, {one.field}", one.held, one.sent) for one in report.lost[:8]]
        _differences(console, f"Turns that lose their history under {report.used}", "where", lost)
    if report.side_requests:
        console.print(
            Text(f"side requests: {len(report.side_requests)}, such as {report.side_requests[0]!r}")
        )
    if report.taken_back:
        console.print(f"answers dropped and asked for again: {report.taken_back}")

    table = Table(
        "matcher",
        "turns that lose their history",
        "conversations",
        "refused by a linear session",
        title="Matchers",
        title_justify="left",
    )
    for name, fate in report.matchers.items():
        marks = [
            mark for mark, there in (("needed", report.needs), ("judged by", report.used)) if there == name
        ]
        named = f"{name} ({', '.join(marks)})" if marks else name
        table.add_row(named, f"{fate.lost} of {report.turns}", str(fate.roots), str(fate.refused))
    console.print(table)
    for cause, count in report.mismatches.items():
        console.print(Text(f"tito_session_mismatch: {count} × {cause}"))
    console.print(
        f"{report.prompts_in_rows} of {report.prompts} prompts stand in the session's rows to the token; "
        f"{report.trained_tokens} of {report.sampled_tokens} sampled tokens carry loss"
    )
    if report.token_exact:
        policy = "linear" if report.matchers[report.used].refused == 0 else "branching"
        console.print(
            Text(f"Trains token-exact with matcher {report.used!r}, policy {policy!r}.", "bold green")
        )
        return
    console.print(Text("Does not train token-exact:", "bold red"))
    for problem in report.problems:
        console.print(Text(f"- {problem}", "red"))


def _differences(console: "Console", title: str, first: str, rows: list[tuple[str, Any, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(first, "held", "sent back", title=title, title_justify="left")
    for where, held, sent in rows:
        table.add_row(Text(where), Text(str(held)), Text(str(sent)))
    console.print(table)
