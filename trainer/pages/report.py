"""What a run came to: a table for the terminal, a plot as PNG, and one HTML file that needs nothing else."""

import datetime
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from titogym import __version__
from titogym.processes import program
from titogym.trainer.pages import view
from titogym.trainer.runs.directory import RunDirectory
from titogym.trainer.runs.metrics import UNIFORM_STEPS, nothing_to_learn, uniform_steps
from titogym.trainer.runs.progress import COLUMNS


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
    if (uniform := uniform_steps(run.metrics())) >= UNIFORM_STEPS:
        console.print(Text(nothing_to_learn(uniform), style="yellow"), soft_wrap=True)
    if summary.steps:
        plot = write_plot(run)
        page = write_html(run)
        console.print(f"Reward plot:  {plot}", highlight=False, soft_wrap=True)
        console.print(f"Report:       {page}", highlight=False, soft_wrap=True)
    shown = view.choose(list(run.trajectories()))
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
    axes.set_title(f"{view.name_of(run)}: reward", loc="left")
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
    steps, config, summary = run.metrics(), run.config(), summarise(run)
    page = view.PAGES.get_template("report.html.jinja").render(
        view.figures(run),
        name=view.name_of(run),
        lead=lead(summary),
        tiles=list(tiles(summary)),
        trajectories=[view.trajectory(*kept) for kept in view.choose(list(run.trajectories()))],
        headings=[column.heading for column in COLUMNS],
        steps=[[column.show(step) for column in COLUMNS] for step in steps],
        figures=list(view.every_figure(steps)),
        config_text=json.dumps(config, indent=2),
        version=__version__,
        date=datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
    )
    path = run.path / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def lead(summary: Summary) -> str:
    if summary.gain is None:
        if summary.before is None:
            return f"{summary.steps} steps, without a held-out evaluation."
        return f"{summary.steps} steps; before them, mean reward on held-out tasks was {summary.before:.3f}."
    if summary.gain == 0:
        return f"Mean reward on held-out tasks stayed at {summary.after:.3f} in {summary.steps} steps."
    verb = "rose" if summary.gain > 0 else "fell"
    return (
        f"Mean reward on held-out tasks {verb} from {summary.before:.3f} to {summary.after:.3f} "
        f"in {summary.steps} steps."
    )


def tiles(summary: Summary) -> Iterator[dict[str, str]]:
    if summary.before is not None:
        yield {"label": "held-out reward before", "value": f"{summary.before:.3f}"}
    if summary.after is not None:
        yield {"label": "held-out reward after", "value": f"{summary.after:.3f}"}
    for label, value in _facts(summary):
        yield {"label": label, "value": value}
