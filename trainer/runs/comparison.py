"""Runs side by side: what they came to, and where their configurations differ."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from titogym.trainer.pages.report import Summary, summarise
from titogym.trainer.runs.directory import Record, RunDirectory

Row = tuple[str, list[str]]

_FACTS: tuple[tuple[str, Callable[[Summary], Any]], ...] = (
    ("steps", lambda s: s.steps),
    ("held-out reward before", lambda s: s.before),
    ("held-out reward after", lambda s: s.after),
    ("gain", lambda s: s.gain),
    ("reward of the last step", lambda s: s.last_reward),
    ("minutes in steps", lambda s: s.seconds / 60),
    ("episodes", lambda s: s.episodes),
    ("failed", lambda s: s.failed),
    ("sampled tokens trained on", lambda s: s.tokens),
)
_MEANS = (
    "time/step",
    "time/wait",
    "time/train",
    "staleness/old_mean",
    "consumption/duration_bias",
    "tis/deviation",
    "tis/k3",
    "logprobs/gap_mean",
    "rollout/tokens_per_second",
)


def results(runs: Sequence[RunDirectory]) -> list[Row]:
    """One row per figure, with a cell per run."""
    summaries = [summarise(run) for run in runs]
    rows = [(name, [_cell(value(summary)) for summary in summaries]) for name, value in _FACTS]
    metrics = [run.metrics() for run in runs]
    rows += [(f"{name} (mean)", [_cell(_mean(steps, name)) for steps in metrics]) for name in _MEANS]
    return [(name, cells) for name, cells in rows if any(cell != "-" for cell in cells)]


def differences(configurations: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row per key that is not the same in all, `run.dir` left out."""
    flat = [dict(_flat(configuration)) for configuration in configurations]
    keys = sorted({key for one in flat for key in one} - {"run.dir"})
    rows = [(key, [_cell(one.get(key)) for one in flat]) for key in keys]
    return [(key, cells) for key, cells in rows if len(set(cells)) > 1]


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _mean(steps: Sequence[Record], name: str) -> float | None:
    values = [step[name] for step in steps if step.get(name) is not None]
    return sum(values) / len(values) if values else None


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
