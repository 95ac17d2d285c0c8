"""An evaluation as it goes, and what it came to, on a terminal; line by line where there is none."""

from collections import Counter, deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from titogym.cli.control import visible
from titogym.cli.tables import print_table
from titogym.envs.task import Task
from titogym.harnesses.evaluation.records import EpisodeRecord, EvaluationDirectory
from titogym.harnesses.evaluation.report import facts, write_report
from titogym.harnesses.evaluation.scores import Scores, score
from titogym.processes import program

_LATEST = 8  # episodes of the live table
_CAUSES = 8


class EvaluationView:
    """A progress bar with a live table of scores and of the latest episodes."""

    def __init__(self, directory: EvaluationDirectory, settings: Mapping[str, Any]) -> None:
        self._directory = directory
        self._settings = settings
        self._console = Console(highlight=False)
        self._records = {(r.task, r.attempt): r for r in directory.records() if r.of_model}
        self._latest: deque[EpisodeRecord] = deque(maxlen=_LATEST)
        self._running: Counter[str] = Counter()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = self._progress.add_task(
            "episodes", total=settings["planned"], completed=len(self._records)
        )
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._console.print(f"Results go to {self._directory.path}.", soft_wrap=True)
        if self._records:
            self._console.print(f"{len(self._records)} episodes are there already.")
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def started(self, task: Task, attempt: int) -> None:
        self._running[task.id] += 1

    def ended(self, record: EpisodeRecord) -> None:
        self._running[record.task] -= 1
        self._records[record.task, record.attempt] = record
        self._latest.append(record)
        self._progress.update(self._bar, completed=len(self._records))
        if not self._console.is_terminal:
            place = f"{len(self._records)}/{self._settings['planned']}"
            self._console.print(f"{place} {record.name}: {_reward(record)}, {record.outcome}", soft_wrap=True)

    def finish(self, *, interrupted: bool) -> None:
        """Write the report; print the scores, the causes of failures, and where to look next."""
        scores = score(self._directory.records(), self._settings["success"])
        console = self._console
        console.print(score_table(scores))
        if scores.ungraded:
            console.print(
                f"{scores.ungraded} of {scores.episodes} episodes could not be graded: they are in no score.",
                style="red",
            )
        if scores.causes:
            print_table(console, _cause_table(scores), "for example")
        path = self._directory.path
        report = write_report(self._directory)
        console.print(f"Report:   {report}", soft_wrap=True)
        console.print(f"Episodes: {program()} show {path}", soft_wrap=True)
        if interrupted:
            console.print(
                f"Interrupted: the same command with --resume --out {path} goes on.",
                style="yellow",
                soft_wrap=True,
            )

    def _render(self) -> Group:
        scores = score(list(self._records.values()), self._settings["success"])
        latest = Table("latest episodes", "reward", "ended by", "turns", "tokens", "seconds", expand=False)
        for record in self._latest:
            latest.add_row(
                Text(record.name),
                _reward(record),
                record.outcome,
                str(record.turns),
                str(record.tokens),
                f"{record.seconds.get('agent', 0.0):.1f}",
            )
        line = f"{sum(self._running.values())} in flight"
        if scores.reward is not None:
            line += f"; mean reward {scores.reward}"
        if 1 in scores.pass_at:
            line += f"; pass@1 {scores.pass_at[1]}"
        line += "; " + ", ".join(f"{count} {outcome}" for outcome, count in scores.outcomes.items())
        return Group(self._progress, Text(line), latest)


def score_table(scores: Scores) -> Table:
    """Scores with their intervals, then what they cost."""
    table = Table("", "value", "95 % interval")
    for column in table.columns[1:]:
        column.justify = "right"
    named = [("mean reward", scores.reward), *((f"pass@{k}", found) for k, found in scores.pass_at.items())]
    for name, found in named:
        if found is not None:
            table.add_row(name, f"{found.value:.3f}", f"{found.low:.3f} to {found.high:.3f}")
    table.add_section()
    for name, value in facts(scores):
        table.add_row(name, value, "")
    return table


def _cause_table(scores: Scores) -> Table:
    table = Table("failed episodes", "ended by", "one of them says", "for example")
    for cause in scores.causes[:_CAUSES]:
        table.add_row(
            str(len(cause.episodes)), cause.outcome, Text(visible(cause.example)), Text(cause.episodes[0])
        )
    return table


def _reward(record: EpisodeRecord) -> str:
    return "no reward" if record.reward is None else f"{record.reward:g}"
