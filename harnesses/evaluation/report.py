"""An evaluation as one HTML file that needs nothing else."""

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from titogym import pages
from titogym.errors import UserError
from titogym.harnesses.evaluation.records import EpisodeRecord, EvaluationDirectory
from titogym.harnesses.evaluation.scores import Scores, score

PAGE = "report.html"
_SHOWN = 24  # episodes in full; failed ones first
_SHOWN_CHARACTERS = 4000  # of one message
_WIDTH = 400  # of the interval's drawing


def write_report(directory: EvaluationDirectory) -> Path:
    """Write report.html from what the directory holds so far."""
    settings, records = directory.settings(), directory.records()
    scores = score(records, settings["success"])
    page = pages.report(
        "titogym.harnesses.evaluation",
        "report.html.jinja",
        name=directory.path.resolve().name,
        lead=lead(scores, settings),
        tiles=[{"label": label, "value": value} for label, value in facts(scores)],
        scores=list(_rows(scores)),
        causes=scores.causes,
        tasks=[
            {"task": t.task, "passed": t.passed, "rewards": t.rewards, "mean": statistics.fmean(t.rewards)}
            for t in scores.tasks
        ],
        episodes=len(records),
        shown=[_episode(directory, record) for record in _choose(records, settings["success"])],
        settings=settings,
        settings_text=json.dumps(settings, indent=2),
    )
    path = directory.path / PAGE
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"The report cannot be written to {path}: {error.strerror}.") from error
    return path


def lead(scores: Scores, settings: Mapping[str, Any]) -> str:
    """The result in one sentence."""
    planned = settings["planned"]
    left = planned - scores.episodes
    part = f" {left} of {planned} episodes are not made yet." if left > 0 else ""
    if scores.reward is None:
        return f"No episode of {settings['source']} was graded.{part}"
    told = f"pass@1 {scores.pass_at[1]}" if 1 in scores.pass_at else f"mean reward {scores.reward}"
    left_out = f" {scores.ungraded} could not be graded and are left out." if scores.ungraded else ""
    return (
        f"{settings['harness']} on {settings['source']}: {told}, from {scores.episodes} episodes of "
        f"{len(scores.tasks)} tasks.{left_out}{part}"
    )


def facts(scores: Scores) -> list[tuple[str, str]]:
    """What it cost."""
    episodes = max(1, scores.episodes)
    return [
        ("episodes", f"{scores.episodes:,}"),
        ("not graded", f"{scores.ungraded:,}"),
        ("turns per episode", f"{scores.turns / episodes:.1f}"),
        ("sampled tokens", f"{scores.tokens:,}"),
        ("prompt tokens", f"{scores.prompt_tokens:,}"),
        ("tokens per episode", f"{scores.tokens / episodes:,.0f}"),
        ("seconds per episode", f"{scores.seconds / episodes:.1f}"),
    ]


def _rows(scores: Scores) -> Iterator[dict[str, Any]]:
    named = [("mean reward", scores.reward), *((f"pass@{k}", found) for k, found in scores.pass_at.items())]
    for name, found in named:
        if found is not None:
            yield {
                "name": name,
                "value": f"{found.value:.3f}",
                "interval": f"{found.low:.3f} to {found.high:.3f}",
                "low": round(found.low * _WIDTH, 1),
                "high": round(found.high * _WIDTH, 1),
                "at": round(found.value * _WIDTH, 1),
            }


def _choose(records: list[EpisodeRecord], success: float) -> list[EpisodeRecord]:
    """The episodes worth reading: those that failed, then those that did not pass."""

    def rank(record: EpisodeRecord) -> int:
        return 0 if record.outcome != "finished" else 1 if (record.reward or 0.0) < success else 2

    return sorted(records, key=rank)[:_SHOWN]


def _episode(directory: EvaluationDirectory, record: EpisodeRecord) -> dict[str, Any]:
    try:
        whole = directory.episode(record.file)
    except UserError:  # its file has been taken away since
        whole = {"conversation": [], "evidence": {}}
    reward = "no reward" if record.reward is None else f"reward {record.reward:g}"
    return {
        "name": record.name,
        "detail": f"{reward}, {record.outcome}, {record.turns} turns, {record.tokens} tokens",
        "error": record.error,
        "parts": [{"who": who, "text": _cut(text)} for who, text in spoken(whole["conversation"])],
        "grade": _cut(json.dumps(whole["evidence"], indent=2)),
    }


def spoken(conversation: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Who said what, message by message; calls are written as functions are."""
    for turn in conversation:
        for message in turn["messages"]:
            content = message["content"]
            yield message["role"], content if isinstance(content, str) else json.dumps(content)
        answer = turn["answer"]
        texts = [answer.get("reasoning_content"), answer.get("content")]
        texts += [
            f"{call['function']['name']}({call['function']['arguments']})"
            for call in answer.get("tool_calls") or ()
        ]
        yield f"model, turn {turn['turn']}", "\n".join(text for text in texts if text)


def _cut(text: str) -> str:
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"
