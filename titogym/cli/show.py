"""`titogym show`: the kept trajectories of a run, token by token; the episodes of an evaluation, replayed."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from titogym.cli.control import visible
from titogym.cli.tables import print_table
from titogym.cli.transcript import print_findings, replay
from titogym.errors import UserError
from titogym.trainer.pages.view import mismatches
from titogym.trainer.runs.directory import RunDirectory

if TYPE_CHECKING:
    from titogym.harnesses.evaluation.records import EvaluationDirectory


def command(
    path: Annotated[
        Path,
        typer.Argument(
            help="Run directory of `titogym train` or `titogym quickstart`; results of `titogym eval`, or "
            "one of its episode files."
        ),
    ],
    episode: Annotated[
        str | None,
        typer.Option("--episode", "-e", help="Of an evaluation: an episode's number or name in the list."),
    ] = None,
    trajectory: Annotated[
        str | None,
        typer.Option("--trajectory", "-t", help="Which one: its number or its name in the list."),
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="One line per token, with every figure.")] = False,
) -> None:
    """List what a run or an evaluation kept, or open one: a trajectory token by token, an episode replayed.

    An episode is replayed with what the agent was told, said and ran, and with its grade.

    Dim tokens came from the template, the task or a tool and carry no loss. The others were sampled by the
    model: green is likely, red is unlikely; without colours they stand in ⟦brackets⟧.
    """
    from titogym.harnesses.evaluation.records import EvaluationDirectory, read_episode

    if episode is not None and trajectory is not None:
        raise UserError("Give either --episode, of an evaluation, or --trajectory, of a training run.")
    if path.is_file():
        replay(read_episode(path))
        return
    if EvaluationDirectory.is_one(path):
        _show_evaluation(EvaluationDirectory(path), episode)
        return
    if episode is not None:
        raise UserError(f"{path} holds no evaluation, whose --episode could be shown.")
    _show_run(path, trajectory, table)


def _show_evaluation(directory: "EvaluationDirectory", episode: str | None) -> None:
    if episode is not None:
        replay(directory.episode(episode))
        return
    records = directory.records()
    console = Console()
    table = Table("#", "episode", "reward", "ended by", "turns", "tokens", "mismatches", "seconds")
    for number, record in enumerate(records):
        table.add_row(
            str(number),
            Text(record.name),
            "-" if record.reward is None else f"{record.reward:g}",
            record.outcome,
            str(record.turns),
            str(record.tokens),
            str(sum(record.mismatches.values()) or ""),
            f"{record.seconds.get('agent', 0.0):.1f}",
        )
    print_table(console, table, "episode")
    console.print(f"Replay one with: titogym show {directory.path} --episode NUMBER", highlight=False)


def _show_run(run_dir: Path, trajectory: str | None, table: bool) -> None:
    if not (run_dir / "config.json").exists() and (run_dir / "run" / "config.json").exists():
        run_dir /= "run"  # the folder of a quickstart holds its model beside its run
    run = RunDirectory(run_dir)
    run.config()
    kept = list(run.trajectories())
    if not kept:
        raise UserError(f"{run_dir} kept no trajectory: set run.keep_trajectories above 0.")
    console = Console()
    if trajectory is None:
        print_table(console, _listing(kept), "name", "task")
        for found in mismatches(run.metrics()):
            line = f"tito_session_mismatch in {found['episodes']} episodes: {found['type']}, {found['cause']}"
            console.print(Text(visible(line), "yellow"), soft_wrap=True)
        console.print(
            f"Open one with: titogym show {run_dir} --trajectory NUMBER", highlight=False, soft_wrap=True
        )
        return
    place, record = _find(kept, trajectory)
    console.rule(Text(f"{place}: {record['task']}"))
    console.print(_facts(record), highlight=False)
    console.print()
    colours = console.color_system is not None and not console.no_color
    console.print(_token_table(record) if table else _token_view(record, colours), soft_wrap=not table)
    if (findings := record.get("findings")) is not None:
        print_findings(console, findings, len(findings))


def _find(kept: list[tuple[str, dict[str, Any]]], wanted: str) -> tuple[str, dict[str, Any]]:
    for number, (place, record) in enumerate(kept):
        if wanted in (place, str(number)):
            return place, record
    raise UserError(
        f"There is no trajectory {wanted!r}: choose 0 to {len(kept) - 1}, or a name from the list."
    )


def _listing(kept: list[tuple[str, dict[str, Any]]]) -> Table:
    differing = ["mismatches"] if any(record.get("findings") for _, record in kept) else []
    table = Table(
        "#", "name", "task", "reward", "advantage", "turns", "tokens", "sampled", "ended", *differing
    )
    for number, (place, record) in enumerate(kept):
        table.add_row(
            str(number),
            place,
            record["task"],
            "-" if record["reward"] is None else f"{record['reward']:.2f}",
            f"{record['advantage']:+.2f}" if "advantage" in record else "held out",
            str(record["turns"]),
            str(len(record["tokens"])),
            str(sum(record["loss_mask"])),
            record["outcome"],
            *([str(len(record.get("findings", ())) or "")] if differing else []),
        )
    return table


def _facts(record: dict[str, Any]) -> str:
    sampled = sum(record["loss_mask"])
    lines = [
        f"reward {record['reward']}, {record['turns']} turns, {record['outcome']}; "
        f"{len(record['tokens'])} tokens, of which {sampled} sampled",
        "weight versions: "
        + ", ".join(f"{v} at {start}-{end - 1}" for start, end, v in record["version_spans"]),
    ]
    if "trainer_logprobs" in record and sampled:
        gap = math.fsum(
            math.nan if ours is None else abs(ours - theirs)  # JSON has no number that is not finite
            for ours, theirs, mask in zip(
                record["trainer_logprobs"], record["logprobs"], record["loss_mask"], strict=True
            )
            if mask
        )
        lines.append(
            f"advantage {record['advantage']:+.3f}, mean |trainer - engine log-prob| {gap / sampled:.1e}"
        )
    return "\n".join(lines)


def _token_view(record: dict[str, Any], colours: bool) -> Text:
    """The text with sampled tokens coloured, or, where there are no colours, in brackets."""
    view, inside = Text(), False
    for text, mask, logprob in zip(record["texts"], record["loss_mask"], record["logprobs"], strict=True):
        if bool(mask) != inside and not colours:
            view.append("⟦" if mask else "⟧")
        inside = bool(mask)
        view.append(visible(text).replace("\n", "⏎\n"), _style(logprob) if mask else "dim")
    return view.append("⟧") if inside and not colours else view


def _token_table(record: dict[str, Any]) -> Table:
    table = Table("#", "id", "token", "loss", "engine", "trainer", "version")
    versions = {p: v for start, end, v in record["version_spans"] for p in range(start, end)}
    trainer = record.get("trainer_logprobs")
    for position, (token, text, mask, logprob) in enumerate(
        zip(record["tokens"], record["texts"], record["loss_mask"], record["logprobs"], strict=True)
    ):
        table.add_row(
            str(position),
            str(token),
            Text(repr(text)[1:-1], _style(logprob) if mask else "dim"),
            str(mask),
            f"{logprob:.4f}" if mask else "",
            _number(trainer[position]) if mask and trainer else "",
            versions.get(position, ""),
        )
    return table


def _number(logprob: float | None) -> str:
    return "not finite" if logprob is None else f"{logprob:.4f}"


def _style(logprob: float) -> str:
    """From green (certain) over yellow to red (unlikely), on the token's background."""
    p = math.exp(min(logprob, 0.0))
    return f"black on rgb({int(235 - 115 * max(0.0, 2 * p - 1))},{int(110 + 110 * min(1.0, 2 * p))},120)"
