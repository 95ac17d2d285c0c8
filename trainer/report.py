"""What a run came to: a table for the terminal, a plot as PNG, and one HTML file that needs nothing else."""

import datetime
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from rich.console import Console
from rich.table import Table

from titogym import __version__
from titogym.processes import program
from titogym.trainer.charts import Series, line_chart
from titogym.trainer.metrics import MEANINGS
from titogym.trainer.progress import COLUMNS
from titogym.trainer.runs import Record, RunDirectory

_SHOWN_TRAJECTORIES = 8


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a run in a few figures. Scores are None where there was no evaluation."""

    steps: int
    before: float | None
    after: float | None
    first_reward: float | None
    last_reward: float | None
    episodes: int
    failed: int
    tokens: int
    seconds: float
    gap: float | None  # mean |trainer - engine log-prob| over all steps

    @property
    def gain(self) -> float | None:
        """How far the held-out reward rose."""
        return None if self.before is None or self.after is None else self.after - self.before


def summarise(run: RunDirectory) -> Summary:
    """The figures of what `run` has written so far."""
    steps, evaluations = run.metrics(), run.evaluations()
    gaps = [step["logprobs/gap_mean"] for step in steps if step.get("logprobs/gap_mean") is not None]
    return Summary(
        steps=len(steps),
        before=evaluations[0]["score"] if evaluations else None,
        after=evaluations[-1]["score"] if len(evaluations) > 1 else None,
        first_reward=steps[0]["reward/mean"] if steps else None,
        last_reward=steps[-1]["reward/mean"] if steps else None,
        episodes=int(sum(step["rollout/episodes"] for step in steps)),
        failed=int(sum(step["rollout/failed"] for step in steps)),
        tokens=int(sum(step["batch/tokens"] for step in steps)),
        seconds=sum(step["time/step"] for step in steps),
        gap=sum(gaps) / len(gaps) if gaps else None,
    )


def finish(run: RunDirectory, console: Console) -> None:
    """Write reward.png and report.html, and print what the run came to and where to look next."""
    summary = summarise(run)
    console.print(_summary_table(summary))
    if summary.steps:
        plot = write_plot(run)
        page = write_html(run)
        console.print(f"Reward plot:  {plot}", highlight=False, soft_wrap=True)
        console.print(f"Report:       {page}", highlight=False, soft_wrap=True)
    shown = choose(list(run.trajectories()))
    if shown:
        trained = [kept for kept in shown if not kept[0].startswith("eval-")] or shown
        best = max(reversed(trained), key=lambda kept: kept[1]["reward"] or 0.0)[0]  # of equals the latest
        command = f"{program()} show {run.path} --trajectory {best}"
        console.print(f"One trajectory, token by token:  {command}", highlight=False, soft_wrap=True)


def _summary_table(summary: Summary) -> Table:
    table = Table("", "before", "after", "change", title="What the run came to")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, before, after in (
        ("reward on held-out tasks", summary.before, summary.after),
        ("reward in training", summary.first_reward, summary.last_reward),
    ):
        change = None if before is None or after is None else after - before
        style = "" if change is None else "bold green" if change > 0 else "bold red"
        table.add_row(
            name, _score(before), _score(after), f"[{style}]{_score(change, '+')}[/]" if style else "-"
        )
    table.add_section()
    for name, value in _facts(summary):
        table.add_row(name, "", value, "")
    return table


def _facts(summary: Summary) -> list[tuple[str, str]]:
    return [
        ("steps", str(summary.steps)),
        ("episodes (failed)", f"{summary.episodes} ({summary.failed})"),
        ("sampled tokens trained on", f"{summary.tokens:,}"),
        ("minutes in steps", f"{summary.seconds / 60:.1f}"),
        ("mean log-prob gap", "-" if summary.gap is None else f"{summary.gap:.1e}"),
    ]


def _name(run: RunDirectory) -> str:
    """The end of the run's path: a folder called `run` says little without the one that holds it."""
    return "/".join(run.path.resolve().parts[-2:])


def _score(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.3f}"


# --- plot --------------------------------------------------------------------------------------------


def write_plot(run: RunDirectory) -> Path:
    """reward.png: training reward per step and held-out reward per weight version."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = run.metrics()
    scored = [e for e in run.evaluations() if e["score"] is not None]
    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(
        [s["step"] for s in steps],
        [s["reward/mean"] for s in steps],
        color="#2563eb",
        linewidth=2,
        label="training (mean of the step)",
    )
    if scored:
        axes.plot(
            [e["version"] for e in scored],
            [e["score"] for e in scored],
            color="#d97706",
            linestyle="--",
            marker="o",
            markersize=8,
            label="held-out tasks",
        )
        for evaluation in scored:
            axes.annotate(
                f"{evaluation['score']:.2f}",
                (evaluation["version"], evaluation["score"]),
                textcoords="offset points",
                xytext=(0, 9),
                ha="center",
                color="#92500a",
            )
    axes.set_ylim(-0.03, 1.08)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.set_title(f"{_name(run)}: reward", loc="left")
    axes.grid(axis="y", color="#e5e5e5")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    path = run.path / "reward.png"
    figure.savefig(path)
    return path


# --- page --------------------------------------------------------------------------------------------


def write_html(run: RunDirectory) -> Path:
    """report.html: curves, evaluations, failures, trajectories and configuration in one file."""
    steps, evaluations, events, config = run.metrics(), run.evaluations(), run.events(), run.config()
    page = (
        Environment(loader=PackageLoader("titogym.trainer", "."), autoescape=True)
        .get_template("report.html.jinja")
        .render(
            name=_name(run),
            lead=_lead(summarise(run)),
            tiles=list(_tiles(summarise(run))),
            charts=[_chart(*spec, steps=steps, evaluations=evaluations) for spec in _CHARTS],
            evaluations=evaluations,
            failures=list(_failures(events)),
            dropped=sum(1 for event in events if event["kind"] == "group_dropped"),
            trajectories=[_trajectory(place, record) for place, record in choose(list(run.trajectories()))],
            headings=[column.heading for column in COLUMNS],
            steps=[[column.show(step) for column in COLUMNS] for step in steps],
            figures=list(_figures(steps)),
            config=config,
            config_text=json.dumps(config, indent=2),
            version=__version__,
            date=datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
        )
    )
    path = run.path / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _lead(summary: Summary) -> str:
    if summary.gain is None:
        return f"{summary.steps} steps, without a held-out evaluation before and after."
    if summary.gain == 0:
        return f"Mean reward on held-out tasks stayed at {summary.after:.3f} in {summary.steps} steps."
    verb = "rose" if summary.gain > 0 else "fell"
    return (
        f"Mean reward on held-out tasks {verb} from {summary.before:.3f} to {summary.after:.3f} "
        f"in {summary.steps} steps."
    )


def _tiles(summary: Summary) -> Iterator[dict[str, str]]:
    if summary.before is not None:
        yield {"label": "held-out reward before", "value": f"{summary.before:.3f}"}
    if summary.after is not None:
        yield {"label": "held-out reward after", "value": f"{summary.after:.3f}"}
    for label, value in _facts(summary):
        yield {"label": label, "value": value}


# title, meaning, number format, [(legend, metric name)]
_CHARTS: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Reward",
        "Mean reward of the episodes that each step trained on, and of held-out tasks.",
        ".2f",
        (("training", "reward/mean"),),
    ),
    (
        "Staleness",
        "Weight versions between the oldest sampling weights of a group and the trainer's.",
        ".1f",
        (("mean over groups", "staleness/old_mean"), ("largest", "staleness/old_max")),
    ),
    (
        "Log-prob gap",
        "Mean |trainer - engine log-prob| of the sampled tokens.",
        ".1e",
        (("gap", "logprobs/gap_mean"),),
    ),
    (
        "Importance weights",
        "|m - 1| with m = exp(trainer - engine log-prob), and the share outside the bounds.",
        ".1e",
        (("mean |m - 1|", "tis/deviation"), ("truncated share", "tis/clipped_fraction")),
    ),
    (
        "Seconds per step",
        "Where a step's time goes: training, waiting for groups, publishing weights.",
        ".1f",
        (
            ("whole step", "time/step"),
            ("wait", "time/wait"),
            ("train", "time/train"),
            ("publish", "time/publish"),
        ),
    ),
    (
        "Throughput",
        "Sampled tokens per second, of episodes that ended in the step.",
        ".0f",
        (("tokens/s", "rollout/tokens_per_second"),),
    ),
    (
        "Queue",
        "Groups that waited in the buffer after the step had taken its own.",
        ".0f",
        (("groups", "buffer/size"), ("rejected as stale", "buffer/stale")),
    ),
)


def _chart(
    title: str,
    meaning: str,
    form: str,
    lines: Sequence[tuple[str, str]],
    *,
    steps: Sequence[Record],
    evaluations: Sequence[Record],
) -> dict[str, Any]:
    series = [
        Series(legend, [(s["step"], s[name]) for s in steps if s.get(name) is not None], f"c{number}")
        for number, (legend, name) in enumerate(lines, start=1)
    ]
    if title == "Reward":
        scores = [(e["version"], e["score"]) for e in evaluations if e["score"] is not None]
        series.append(Series("held-out tasks", scores, "c2", markers=True))
    series = [s for s in series if s.points]
    width, height = (1060, 300) if title == "Reward" else (340, 180)
    svg = line_chart(series, width=width, height=height, y_format=form)
    return {"title": title, "meaning": meaning, "series": series, "svg": svg}


def _figures(steps: Sequence[Record]) -> Iterator[dict[str, str]]:
    """Every figure that the steps have, with its meaning and how it went."""
    for name in sorted({name for step in steps for name in step if "/" in name}):
        values = [step[name] for step in steps if step.get(name) is not None]
        if values:
            first, mean, last = (f"{v:.4g}" for v in (values[0], statistics.fmean(values), values[-1]))
            meaning = MEANINGS.get(name, "")
            yield {"name": name, "first": first, "mean": mean, "last": last, "meaning": meaning}


def _failures(events: Sequence[Record]) -> Iterator[dict[str, Any]]:
    failed = [event for event in events if event["kind"] == "episode_failed"]
    last = {event["cause"]: event["error"] for event in failed}
    for cause, count in Counter(event["cause"] for event in failed).most_common():
        yield {"cause": cause, "count": count, "error": last[cause] or ""}


def choose(kept: Sequence[tuple[str, Record]]) -> list[tuple[str, Record]]:
    """The trajectories worth showing: the same held-out tasks before and after, then the last step's."""
    evaluated = [(place, record) for place, record in kept if place.startswith("eval-")]
    trained = [(place, record) for place, record in kept if not place.startswith("eval-")]
    if not evaluated:
        return trained[-_SHOWN_TRAJECTORIES:]
    first, last = evaluated[0][0].partition("/")[0], evaluated[-1][0].partition("/")[0]
    pairs = []
    for task in dict.fromkeys(record["task"] for _, record in evaluated):
        for version in dict.fromkeys((first, last)):
            of_task = [(p, r) for p, r in evaluated if r["task"] == task and p.partition("/")[0] == version]
            pairs += of_task[:1]
    return pairs[: _SHOWN_TRAJECTORIES - 2] + trained[-2:]


def _trajectory(place: str, record: Record) -> dict[str, Any]:
    kind, _, number = place.partition("/")[0].partition("-")
    when = f"held-out, version {int(number)}" if kind == "eval" else f"trained on in step {int(number)}"
    reward = "no reward" if record["reward"] is None else f"reward {record['reward']:.2f}"
    advantage = f", advantage {record['advantage']:+.2f}" if "advantage" in record else ""
    return {
        "title": f"{record['task']} ({when}): {reward}{advantage}",
        "detail": f"{place}: {record['turns']} turns, {record['outcome']}, {len(record['tokens'])} tokens",
        "pieces": [_piece(record, position) for position in range(len(record["tokens"]))],
    }


def _piece(record: Mapping[str, Any], position: int) -> dict[str, Any]:
    text = record["texts"][position].replace("\n", "⏎\n")
    tip = f"#{position}  id {record['tokens'][position]}"
    if not record["loss_mask"][position]:
        return {"sampled": False, "text": text, "tip": tip}
    logprob = record["logprobs"][position]
    tip += f"\nengine log-prob {logprob:.4f} (p = {math.exp(min(logprob, 0.0)):.3f})"
    if "trainer_logprobs" in record:
        tip += f"\ntrainer log-prob {record['trainer_logprobs'][position]:.4f}"
    for start, end, version in record["version_spans"]:
        if start <= position < end:
            tip += f"\nweight version {version}"
    return {"sampled": True, "text": text, "tip": tip, "strength": f"{surprise(logprob):.2f}"}


def surprise(logprob: float) -> float:
    """How strongly to mark a token: 0.08 for a certain one, 0.9 for one of probability 0."""
    return 0.08 + 0.82 * (1 - math.exp(min(logprob, 0.0)))
