"""The live view of a run: one line per step, and below it what is going on right now."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from titogym.trainer.evaluation import Evaluation
from titogym.trainer.runs.metrics import UNIFORM_STEPS, nothing_to_learn, uniform_steps

_RATE_SECONDS = 15.0  # the live rate is the mean over so many seconds


@dataclass(frozen=True, slots=True)
class Status:
    """What a run is doing at one moment."""

    step: int
    steps: int
    phase: str
    in_flight: int
    places: int
    queue: int
    capacity: int
    episodes: int
    failed: int
    sampled_tokens: int


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the step table: a heading and how to print it from a step's record."""

    heading: str
    show: Callable[[Mapping[str, Any]], str]
    width: int
    always: bool = True  # also where the terminal is narrow


def _number(name: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda record: "-" if record.get(name) is None else format(record[name], form)


def _staleness(record: Mapping[str, Any]) -> str:
    if record.get("staleness/old_mean") is None:
        return "-"
    return f"{record['staleness/old_mean']:.1f} ({record['staleness/old_max']:.0f})"


COLUMNS = (
    Column("step", lambda r: str(r["step"]), 5),
    Column("reward", _number("reward/mean", ".3f"), 6),
    Column("in flight", _number("rollout/in_flight", ".0f"), 9),
    Column("queue", _number("buffer/size", ".0f"), 5),
    Column("stale (max)", _staleness, 11),
    Column("tok/s", _number("rollout/tokens_per_second", ".0f"), 6),
    Column("gap", _number("logprobs/gap_mean", ".1e"), 7),
    Column("step s", _number("time/step", ".1f"), 6, always=False),
    Column("wait s", _number("time/wait", ".1f"), 6, always=False),
    Column("train s", _number("time/train", ".1f"), 7, always=False),
    Column("bottleneck", lambda r: str(r["bottleneck"]), 10),
    Column("failed", _number("rollout/failed", ".0f"), 6, always=False),
)
LEGEND = (
    "reward: mean of the step's episodes; stale: weight versions behind, mean (max) over groups; "
    "gap: mean |trainer - engine log-prob|"
)
_BOTTLENECK_STYLES = {"rollout": "yellow", "trainer": "magenta", "staleness": "red", "balanced": "green"}


class Progress:
    """Prints a run. On a terminal it is live; elsewhere each event is one plain line."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._status: Callable[[], Status] | None = None
        self._rates: deque[tuple[float, int]] = deque()
        self._printed_heading = False
        self._uniform = 0  # steps in a row that taught nothing

    @contextmanager
    def running(self) -> Iterator[None]:
        """Live while the block runs, where the console is a terminal."""
        if not self.console.is_terminal:
            yield
            return
        with Live(get_renderable=self._render, console=self.console, refresh_per_second=4) as self._live:
            try:
                yield
            finally:
                self._live = None

    def watch(self, status: Callable[[], Status]) -> None:
        """Show what `status` returns, from now on."""
        self._status = status

    def note(self, text: str) -> None:
        """One line about what happens next."""
        self.console.print(Text(text, style="dim"), soft_wrap=True)  # there may be a command in it

    def step(self, record: Mapping[str, Any]) -> None:
        """One step is done; `record` is its line of metrics.jsonl."""
        if not self._printed_heading:
            self._printed_heading = True
            self.console.print(Text(LEGEND, style="dim"), soft_wrap=not self.console.is_terminal)
            heading = "  ".join(f"{column.heading:>{column.width}}" for column in self._columns())
            self.console.print(Text(heading, style="bold"), soft_wrap=True)
        self.console.print(_line(record, self._columns()), soft_wrap=True)
        self._uniform = self._uniform + 1 if uniform_steps([record]) else 0
        if self._uniform == UNIFORM_STEPS:
            self.console.print(Text(nothing_to_learn(UNIFORM_STEPS), style="yellow"), soft_wrap=True)

    def evaluation(self, evaluation: Evaluation) -> None:
        """One held-out evaluation is done."""
        score = "no episode could be graded" if evaluation.score is None else f"{evaluation.score:.3f}"
        failed = ", ".join(f"{count} x {cause}" for cause, count in evaluation.failures.items())
        self.console.print(
            Text.assemble(
                (f"held-out reward at version {evaluation.version}: ", ""),
                (score, "bold green"),
                (f" over {evaluation.tasks} tasks", ""),
                (f" (failed: {failed})" if failed else "", "red"),
            )
        )

    def _columns(self) -> Sequence[Column]:
        needed = sum(column.width + 2 for column in COLUMNS) - 2
        if not self.console.is_terminal or self.console.width >= needed:
            return COLUMNS
        return [column for column in COLUMNS if column.always]

    def _render(self) -> RenderableType:
        if self._status is None:
            return Spinner("dots", Text("starting"))
        status = self._status()
        rate = self._rate(status.sampled_tokens)
        line = Table.grid(padding=(0, 3))
        line.add_row(
            Spinner("dots", Text(f"step {status.step}/{status.steps}: {status.phase}", style="bold")),
            Text("in flight ") + _bar(status.in_flight, status.places),
            Text("queue ") + _bar(status.queue, status.capacity),
            f"{rate:.0f} tok/s",
            f"{status.episodes} episodes, {status.failed} failed",
        )
        return Group(Rule(style="dim"), line)

    def _rate(self, tokens: int) -> float:
        now = time.monotonic()
        self._rates.append((now, tokens))
        while now - self._rates[0][0] > _RATE_SECONDS:
            self._rates.popleft()
        since, before = self._rates[0]
        return (tokens - before) / (now - since) if now > since else 0.0


def _line(record: Mapping[str, Any], columns: Sequence[Column]) -> Text:
    cells = []
    for column in columns:
        style = ""
        if column.heading == "reward":
            style = "bold"
        elif column.heading == "bottleneck":
            style = _BOTTLENECK_STYLES[record["bottleneck"]]
        elif column.heading == "failed" and record["rollout/failed"]:
            style = "red"
        cells.append(Text(f"{column.show(record):>{column.width}}", style=style))
    return Text("  ").join(cells)


def _bar(value: int, most: int, width: int = 10) -> Text:
    filled = round(width * min(value / most, 1.0))
    return Text.assemble(("█" * filled, "cyan"), ("░" * (width - filled), "dim"), f" {value}/{most}")
