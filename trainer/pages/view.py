"""What the pages about a run show, as plain values for the templates in `pages`."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from titogym.harnesses.findings import compared, described
from titogym.pages import templates
from titogym.trainer.learning.bins import LAG_BUCKETS
from titogym.trainer.pages.charts import Series, bar_chart, line_chart
from titogym.trainer.runs.directory import Record, RunDirectory
from titogym.trainer.runs.metrics import MEANINGS

PAGES = templates("titogym.trainer", "pages")

_SHOWN_TRAJECTORIES = 8
_MOST_POINTS = 500  # of one curve; beyond that only every so many steps are drawn, the last one always
_SLOW_STEPS = 20  # steps among which the slowest episodes are looked for
_REASONS = {
    "stale": "older than buffer.max_staleness allows",
    "failures": "too few of their episodes could be trained on",
    "filtered": "refused by buffer.filter",
}


def name_of(run: RunDirectory) -> str:
    """The end of the run's path: a folder called `run` says little without the one that holds it."""
    return "/".join(run.path.resolve().parts[-2:])


def figures(run: RunDirectory) -> dict[str, Any]:
    """What `figures.html.jinja` needs."""
    steps, evaluations, events = run.metrics(), run.evaluations(), run.events()
    last = steps[-1] if steps else {}
    bins = last.get("histogram", {})
    recent = [episode for step in steps[-_SLOW_STEPS:] for episode in step.get("slowest", [])]
    return {
        "charts": [_chart(*spec, steps=steps, evaluations=evaluations) for spec in _CHARTS],
        "histogram": bar_chart([_edge(edge) for edge in bins], list(bins.values()), width=520, height=190),
        "lags": list(_lags(last)),
        "consumption": list(_consumption(last.get("consumption", {}))),
        "bias": _bias(last.get("consumption/duration_bias")),
        "starved": sorted({e["task"] for e in events if e["kind"] == "task_starved"}),
        "slowest": sorted(recent, key=lambda e: -e["seconds"])[:8],
        "slow_steps": min(_SLOW_STEPS, len(steps)),
        "evaluations": evaluations,
        "failures": list(_failures(events)),
        "mismatches": mismatches(steps),
        "dropped": Counter(_REASONS[e["reason"]] for e in events if e["kind"] == "group_dropped"),
    }


def _edge(upper: str) -> str:
    return "more" if upper == "inf" else f"≤ {upper}"


def _lags(step: Mapping[str, Any]) -> Iterator[list[str]]:
    for bucket, first, last in LAG_BUCKETS:
        if tokens := step.get(f"tis/lag_{bucket}/tokens"):
            label = str(first) if first == last else f"{first} or more" if last > 100 else f"{first}-{last}"
            values = [step[f"tis/lag_{bucket}/{key}"] for key in ("deviation", "k3", "clipped_fraction")]
            yield [label, f"{tokens:.0f}", *(f"{value:.2g}" for value in values)]


def _consumption(table: Mapping[str, Mapping[str, int]]) -> Iterator[list[str]]:
    for bucket, fates in table.items():
        yield [bucket, *(str(fates.get(fate, 0)) for fate in ("trained", "stale", "failures", "filtered"))]


def _bias(bias: float | None) -> str:
    if bias is None:
        return "Nothing has been trained on yet."
    return (
        f"The mean duration of groups trained on is {bias:.2f} of that of all finished ones; well below 1, "
        "training leans to short tasks."
    )


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
    every = math.ceil(len(steps) / _MOST_POINTS) or 1
    steps = [step for number, step in enumerate(reversed(steps)) if number % every == 0][::-1]
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


def every_figure(steps: Sequence[Record]) -> Iterator[dict[str, str]]:
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


def mismatches(steps: Sequence[Record]) -> list[dict[str, Any]]:
    """In how many episodes `tito_session_mismatch` found what, the most frequent first."""
    episodes: Counter[tuple[str, str]] = Counter()
    for step in steps:
        for kind, causes in step.get("mismatches", {}).items():
            episodes.update({(kind, cause): count for cause, count in causes.items()})
    return [
        {"type": kind, "cause": cause, "episodes": count} for (kind, cause), count in episodes.most_common()
    ]


class Listing:
    """The latest kept trajectories as lines of a table. Only files that are shown are read, and once."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._lines: dict[str, tuple[int, list[dict[str, Any]]]] = {}  # file -> its change time, its lines

    def latest(self, most: int = 60) -> list[dict[str, Any]]:
        """Newest first."""
        lines: list[dict[str, Any]] = []
        for name, changed in self._run.trajectory_files():
            if len(lines) >= most:
                break
            if self._lines.get(name, (None,))[0] != changed:
                self._lines[name] = changed, [_line(f"{name}/{n}", r) for n, r in self._run.kept(name)]
            lines += self._lines[name][1]
        return lines[:most]


def _line(place: str, record: Record) -> dict[str, Any]:
    return {
        "place": place,
        "task": record["task"],
        "reward": "-" if record["reward"] is None else f"{record['reward']:.2f}",
        "turns": record["turns"],
        "tokens": len(record["tokens"]),
        "outcome": record["outcome"],
        "mismatches": len(record.get("findings", ())),
    }


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


def trajectory(place: str, record: Record) -> dict[str, Any]:
    kind, _, number = place.partition("/")[0].partition("-")
    when = f"held-out, version {int(number)}" if kind == "eval" else f"trained on in step {int(number)}"
    reward = "no reward" if record["reward"] is None else f"reward {record['reward']:.2f}"
    advantage = f", advantage {record['advantage']:+.2f}" if "advantage" in record else ""
    return {
        "title": f"{record['task']} ({when}): {reward}{advantage}",
        "detail": f"{place}: {record['turns']} turns, {record['outcome']}, {len(record['tokens'])} tokens",
        "findings": [f"{described(f)}: {compared(f)}" for f in record.get("findings", ())],
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
        trainer = record["trainer_logprobs"][position]
        tip += f"\ntrainer log-prob {'not finite' if trainer is None else f'{trainer:.4f}'}"
    for start, end, version in record["version_spans"]:
        if start <= position < end:
            tip += f"\nweight version {version}"
    return {"sampled": True, "text": text, "tip": tip, "strength": f"{surprise(logprob):.2f}"}


def surprise(logprob: float) -> float:
    """How strongly to mark a token: 0.08 for a certain one, 0.9 for one of probability 0."""
    return 0.08 + 0.82 * (1 - math.exp(min(logprob, 0.0)))
