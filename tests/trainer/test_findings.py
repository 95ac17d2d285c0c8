"""What a training run tells of `tito_session_mismatch`: in its steps, its trajectories and its pages."""

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from tests.trainer.test_asynchronous import Case
from tests.trainer.worlds import episode, tasks
from titogym.cli.main import app
from titogym.harnesses.episode import EpisodeResult
from titogym.harnesses.findings import Finding
from titogym.trainer.pages.live import serving
from titogym.trainer.pages.report import write_html
from titogym.trainer.pages.view import mismatches
from titogym.trainer.runs.directory import RunDirectory
from titogym.trainer.runs.records import episode_records
from titogym.trainer.runs.storage import read_groups

CAUSE = "model: it sampled control tokens inside its answer"
FINDING: Finding = {
    "type": "special_token_count",
    "cause": CAUSE,
    "leaf": "0",
    "message": 2,
    "role": "assistant",
    "at": 3,
    "row_ids": [17],
    "rendered_ids": [18, 19],
    "row_total": 1,
    "rendered_total": 2,
    "row_text": "<script>",
    "rendered_text": "<script>",
}
LINE = f"special_token_count in message 2 (assistant), token 3; {CAUSE}"
SIDES = "row '<script>' [17], rendered again '<script>' [18 19]"


def differing(number: int) -> EpisodeResult:
    """An episode of two trajectories, of which the first differs."""
    made = episode(tasks(5)[0], number % 4, trajectories=2)
    return replace(made, mismatches={"special_token_count": 1}, findings=[FINDING])


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("runs") / "bandit"
    case = Case(path, run__steps=2, run__keep_trajectories=8, run__keep_batches=True)
    case.world.break_episode = differing
    asyncio.run(case.go())
    return path


def test_a_step_counts_episodes_by_type_and_cause(directory):
    steps = RunDirectory(directory).metrics()
    assert steps[0]["rollout/mismatch_rate"] == 1
    for step in steps:
        ended = step["rollout/episodes"]
        assert step["mismatches"] == ({"special_token_count": {CAUSE: ended}} if ended else {})
    (found,) = mismatches(steps)
    assert found["episodes"] == sum(step["rollout/episodes"] for step in steps)


def test_what_is_kept_of_a_trajectory_holds_what_was_found_in_it(directory):
    run = RunDirectory(directory)
    kept = {(r["leaf"], len(r["findings"])) for place, r in run.trajectories() if place.startswith("step-")}
    assert kept == {("0", 1), ("1", 0)}
    (groups, *_) = (read_groups(path) for path in sorted((directory / "batches").iterdir()))
    assert [s.metadata["findings"] for g in groups for s in g.samples if s.metadata["leaf"] == "0"]


def test_a_held_out_episode_keeps_it_too():
    records = episode_records([differing(1)], str)
    assert [record["findings"] for record in records] == [[FINDING], []]


def show(directory, *words: str) -> str:
    done = CliRunner().invoke(app, ["show", str(directory), *words], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    return done.output


def test_show_lists_and_explains(directory):
    kept = [r for _, r in RunDirectory(directory).trajectories()]
    listing = show(directory)
    assert "mismatches" in listing
    assert f"episodes: special_token_count, {CAUSE}" in listing
    number = next(number for number, r in enumerate(kept) if r["findings"])
    told = show(directory, "-t", str(number))
    assert f"  {LINE}\n    {SIDES}\n" in told
    clean = next(number for number, r in enumerate(kept) if not r["findings"])
    assert "tito_session_mismatch: none" in show(directory, "-t", str(clean))


def test_pages_count_and_explain(directory):
    run = RunDirectory(directory)
    place = next(place for place, r in run.trajectories() if r["findings"])
    escaped = f"{LINE}: {SIDES}".replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#39;")
    with serving(run, 0) as url:
        assert escaped in httpx.get(f"{url}/trajectories/{place}").text
        live = httpx.get(url).text
    assert f"<td>special_token_count</td><td>{mismatches(run.metrics())[0]['episodes']}</td>" in live
    assert "<th>mismatches</th>" in live
    report = write_html(run).read_text()
    assert escaped in report
    assert CAUSE in report
