"""Report, charts, progress and `titogym show` on the run directory of a real (in-memory) run."""

import dataclasses
import io
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from tests.trainer.test_asynchronous import Case
from tests.trainer.worlds import failed, tasks
from titogym.cli.main import app
from titogym.errors import UserError
from titogym.trainer.evaluation import summarise
from titogym.trainer.pages import report, view
from titogym.trainer.pages.charts import Series, line_chart, nice_ticks
from titogym.trainer.runs.directory import RunDirectory
from titogym.trainer.runs.progress import Progress, Status


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    import asyncio

    path: Path = tmp_path_factory.mktemp("runs") / "bandit"
    case = Case(path, run__steps=8)
    case.world.break_episode = lambda n: (
        failed(tasks(1)[0], "crashed", "It <broke> & died.") if n == 7 else None
    )
    asyncio.run(case.go())
    return path


class Page(HTMLParser):
    """Collects tags, titles and what would be fetched from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.remote: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.remote += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "link", "line", "circle", "polyline", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in ("line", "circle", "polyline"):
            return
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_data(self, data):
        self.text += data


def test_the_report_is_one_well_formed_file_with_everything_in_it(directory):
    run = RunDirectory(directory)
    page = Page(report.write_html(run).read_text())
    assert page.open == []
    assert page.remote == []
    assert page.count["svg"] >= 5
    before, after = (e["score"] for e in run.evaluations())
    assert f"from {before:.3f} to {after:.3f} in 8 steps" in page.text
    assert "It <broke> & died." in page.text  # escaped in the source, whole for the reader
    assert "<90>" in page.text  # a token's text
    assert '"samples_per_prompt": 4' in page.text


def test_the_report_shows_the_same_held_out_task_before_and_after(directory):
    chosen = view.choose(list(RunDirectory(directory).trajectories()))
    assert [(place.partition("/")[0], record["task"]) for place, record in chosen[:4]] == [
        ("eval-000000", "test-0"),
        ("eval-000008", "test-0"),
        ("eval-000000", "test-1"),
        ("eval-000008", "test-1"),
    ]
    assert chosen[-1][0].startswith("step-000008")


def test_finish_prints_table_plot_report_and_a_command_that_works(directory):
    out = io.StringIO()
    report.finish(RunDirectory(directory), Console(file=out, width=120))
    text = out.getvalue()
    assert (directory / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "reward on held-out tasks" in text
    command = re.search(r"titogym (show .+)", text)
    assert command
    shown = CliRunner().invoke(app, command[1].split())
    assert shown.exit_code == 0
    assert "mean |trainer - engine log-prob|" in shown.output


def test_show_lists_and_opens_by_number_and_marks_what_was_sampled(directory):
    listing = CliRunner().invoke(app, ["show", str(directory)], env={"COLUMNS": "160"})
    assert listing.exit_code == 0
    assert "eval-000000/0" in listing.output
    opened = CliRunner().invoke(app, ["show", str(directory), "-t", "0"], env={"NO_COLOR": "1"})
    assert "<90><91><92>⟦<3><3>⟧" in opened.output
    table = CliRunner().invoke(app, ["show", str(directory), "-t", "0", "--table"], env={"COLUMNS": "160"})
    assert len([line for line in table.output.splitlines() if "<" in line]) == 5


@pytest.mark.parametrize(
    ("arguments", "message"), [([".", "-t", "0"], "not a run directory"), (["-t", "999"], "choose 0 to")]
)
def test_show_says_what_is_wrong(directory, tmp_path, arguments, message):
    where = [str(tmp_path)] if arguments[0] == "." else [str(directory)]
    result = CliRunner().invoke(app, ["show", *where, *arguments[-2:]])
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


def test_a_run_without_a_single_step_still_reports(tmp_path):
    case = Case(tmp_path)
    run = RunDirectory.create(tmp_path, case.config)
    out = io.StringIO()
    report.finish(run, Console(file=out))
    assert "steps" in out.getvalue()
    assert not (tmp_path / "report.html").exists()


# --- charts ------------------------------------------------------------------------------------------


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_ticks_enclose_the_data_and_are_few(low, extent):
    ticks = nice_ticks(low, low + extent)
    slack = 1e-6 * max(abs(low), extent, 1)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + extent - slack
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(set(ticks))


def test_values_that_are_not_numbers_leave_gaps_not_errors():
    svg = line_chart([Series("a", [(1, float("nan")), (2, 0.5)], "c1")], width=100, height=50)
    assert svg.count("<circle") == 1
    assert line_chart([Series("a", [], "c1")], width=100, height=50) == ""


# --- progress ----------------------------------------------------------------------------------------


def status() -> Status:
    return Status(
        step=3,
        steps=9,
        phase="training",
        in_flight=5,
        places=8,
        queue=2,
        capacity=4,
        episodes=40,
        failed=1,
        sampled_tokens=1000,
    )


def test_on_a_terminal_the_live_line_says_what_is_going_on(directory):
    out = io.StringIO()
    progress = Progress(Console(file=out, force_terminal=True, width=180))
    with progress.running():
        progress.watch(status)
        for record in RunDirectory(directory).metrics():
            progress.step(record)
    text = out.getvalue()
    for expected in ("step 3/9: training", "5/8", "2/4", "40 episodes, 1 failed", "bottleneck"):
        assert expected in text


def test_on_a_narrow_terminal_no_step_line_wraps(directory):
    out = io.StringIO()
    progress = Progress(Console(file=out, force_terminal=True, color_system=None, width=80))
    progress.step(RunDirectory(directory).metrics()[0])
    heading, line = out.getvalue().splitlines()[-2:]
    assert len(heading) == len(line) <= 80
    for expected in ("reward", "in flight", "queue", "stale", "tok/s", "gap", "bottleneck"):
        assert expected in heading


def test_without_a_terminal_each_step_is_one_plain_line(directory):
    out = io.StringIO()
    progress = Progress(Console(file=out, width=180))
    records = RunDirectory(directory).metrics()
    with progress.running():
        progress.watch(status)
        for record in records:
            progress.step(record)
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert len(lines) == 2 + len(records)
    first = lines[2].split()
    assert first[0] == "1"
    assert float(first[1]) == pytest.approx(records[0]["reward/mean"], abs=5e-4)


def test_an_evaluation_names_its_failures_and_never_counts_them_as_zero():
    task = tasks(1)[0]
    evaluation = summarise([failed(task, "timeout"), failed(task, "crashed")], version=3)
    assert evaluation.score is None
    out = io.StringIO()
    Progress(Console(file=out, width=180)).evaluation(evaluation)
    assert "no episode could be graded" in out.getvalue()
    assert "1 x no_reward, 1 x crashed" in out.getvalue()


def test_the_lead_of_a_run_under_way_tells_the_reward_before(directory):
    summary = dataclasses.replace(report.summarise(RunDirectory(directory)), after=None)
    assert report.lead(summary).endswith(f"mean reward on held-out tasks was {summary.before:.3f}.")
    assert report.lead(dataclasses.replace(summary, before=None)).endswith("without a held-out evaluation.")


def test_steps_that_teach_nothing_are_noticed_once_and_told_at_the_end(directory, tmp_path):
    record = RunDirectory(directory).metrics()[0]
    uniform, mixed = ({**record, "reward/uniform_groups": share} for share in (1.0, 0.9))
    shutil.copytree(directory, tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    run.metrics_path.unlink()
    out = io.StringIO()
    console = Console(file=out, width=180)
    progress = Progress(console)
    for step in [uniform] * 4 + [mixed] + [uniform] * 7:
        run.add_metrics(step)
        progress.step(step)
    assert re.findall(r"the last (\d+) steps", out.getvalue()) == ["5"]
    report.finish(run, console)
    assert re.findall(r"the last (\d+) steps", out.getvalue()) == ["5", "7"]
    assert "docs/troubleshooting.md" in out.getvalue()
