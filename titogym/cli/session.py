"""`titogym session`: look at the sessions of a running gateway."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from titogym.cli.control import visible
from titogym.cli.tables import print_table
from titogym.errors import UserError
from titogym.gateway.client import GatewayClient, GatewayError
from titogym.gateway.trajectories import Trajectory
from titogym.harnesses.findings import findings, side

command = typer.Typer(
    help="List, inspect and delete the sessions of a running gateway.", no_args_is_help=True
)

Url = Annotated[str, typer.Option("--gateway", envvar="TITOGYM_GATEWAY", help="URL of the gateway.")]
Key = Annotated[str | None, typer.Option(envvar="TITOGYM_ADMIN_KEY", help="Its admin key.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_LOCAL = "http://127.0.0.1:8080"
_OPEN, _CLOSE = "⟦", "⟧"


@command.command("list")
def list_(gateway: Url = _LOCAL, admin_key: Key = None, as_json: AsJson = False) -> None:
    """Show every session."""
    sessions = _ask(gateway, admin_key, lambda client: client.sessions())
    if as_json:
        typer.echo(json.dumps(sessions, indent=2))
        return
    table = Table("session", "turns", "matcher", "policy", "last used", "labels")
    for session in sessions:
        used = datetime.fromtimestamp(session["touched"]).isoformat(" ", "seconds")
        labels = " ".join(f"{name}={value}" for name, value in session["labels"].items())
        table.add_row(
            session["id"], str(session["turns"]), session["matcher"], session["policy"], used, labels
        )
    print_table(Console(), table, "session")


@command.command()
def inspect(
    session: Annotated[str, typer.Argument(help="The session's id.")],
    tokens: Annotated[bool, typer.Option(help="Show each trajectory token by token.")] = False,
    gateway: Url = _LOCAL,
    admin_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Show a session's tree, its diagnostics, and where its rows differ from a fresh rendering."""
    report = _ask(gateway, admin_key, lambda client: client.inspect(session))
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    console = Console()
    console.print(_tree(report))
    _print_diagnostics(console, report)
    if tokens:
        for trajectory, texts in _ask(gateway, admin_key, lambda client: client.token_texts(session)):
            console.rule(f"trajectory to turn {trajectory.leaf}: {len(texts)} tokens")
            console.print(token_view(trajectory, texts, colours=colours(console)))


@command.command()
def delete(
    session: Annotated[str, typer.Argument(help="The session's id.")],
    gateway: Url = _LOCAL,
    admin_key: Key = None,
) -> None:
    """Delete a session; its turns in flight are aborted."""
    _ask(gateway, admin_key, lambda client: client.delete(session))


def colours(console: Console) -> bool:
    """Whether colours are shown there."""
    return console.color_system is not None and not console.no_color


def token_view(trajectory: Trajectory, texts: list[str], *, colours: bool) -> Text:
    """A trajectory for the terminal: prompt tokens dim, sampled ones from green (sure) to red.

    Without `colours` each stretch of sampled tokens stands in brackets.
    """
    view = Text()
    before = 0
    for text, loss, logprob in zip(texts, trajectory.loss_mask, trajectory.logprobs, strict=True):
        if not colours and loss != before:
            view.append(_OPEN if loss else _CLOSE)
        before = loss
        shown = text if text == "\n" else visible(text).replace("\n", "⏎\n")
        view.append(shown, _colour(logprob) if loss else "dim")
    if not colours and before:
        view.append(_CLOSE)
    return view


def _colour(logprob: float) -> str:
    probability = math.exp(min(logprob, 0.0))
    return f"black on rgb({int(255 - 120 * probability)},{int(120 + 135 * probability)},120)"


def _tree(report: dict[str, Any]) -> Tree:
    root = Tree(Text(f"{report['id']}  {report['turns']} turns, {report['sampled_tokens']} sampled tokens"))
    children = Counter(node["parent"] for node in report["tree"])
    branches: dict[int | None, Tree] = {None: root}  # a line of turns stays at one level; a fork indents
    for node in report["tree"]:
        line = (
            f"turn {node['id']}: +{node['prompt_tokens']} prompt, +{node['output_tokens']} sampled"
            f"{', superseded' if node['superseded'] else ''}, {node['finish']}, "
            f"version {' '.join(node['versions'])}"
        )
        said = " ".join(
            [visible(node["content"]).replace("\n", " ")[:60], *(f"[{name}]" for name in node["tool_calls"])]
        )
        level = branches[node["parent"]]
        shown = level.add(Text.assemble(line, "  ", (said, "italic")))
        branches[node["id"]] = shown if children[node["id"]] > 1 else level
    return root


def _print_diagnostics(console: Console, report: dict[str, Any]) -> None:
    diagnostics = report["diagnostics"]
    for name, reason in diagnostics["ignored"].items():
        console.print(Text(f"ignored {name}: {reason}"))
    for name, count in diagnostics["rewritten"].items():
        console.print(Text(f"the harness rewrote {name} of {count} answers"))
    if report["last_error"]:
        console.print(Text(f"last error: {report['last_error']['message']}", "red"))
    if not (found := findings(report, len(diagnostics["mismatches"]))):
        console.print("tito_session_mismatch: none")
        return
    table = Table("type", "message", "row", "rendered again", "probable cause", title="tito_session_mismatch")
    for finding in found:
        place = f"{finding['message']} ({finding['role']})"
        sides = Text(side(finding, "row")), Text(side(finding, "rendered"))
        table.add_row(finding["type"], place, *sides, Text(visible(finding["cause"])))
    console.print(table)


def _ask(url: str, key: str | None, question: Callable[[GatewayClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with GatewayClient(url, key) as client:
            return await question(client)

    try:
        return asyncio.run(run())
    except GatewayError as error:
        if error.code == "invalid_admin_key":
            wrong = "has another admin key than that" if key else "wants its admin key"
            raise UserError(
                f"The gateway at {url} {wrong}: give it with --admin-key or TITOGYM_ADMIN_KEY."
            ) from None
        if error.status is None:
            raise UserError(
                f"{error} Start one with `titogym serve`, or name the one that runs with --gateway or "
                "TITOGYM_GATEWAY."
            ) from None
        raise UserError(str(error)) from None
