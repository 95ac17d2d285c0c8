from pathlib import Path

import pytest
from typer.testing import CliRunner

from titogym.cli.main import app
from titogym.envs.checking import Report, Trials, check_all
from titogym.envs.registry import STARTER, task_directories
from titogym.envs.sandboxes import owners

pytestmark = pytest.mark.sandbox


def make_task(directory: Path, *, solve: str, test: str, dockerfile: str = "FROM debian\n") -> Path:
    for name, text in {
        "task.toml": "",
        "instruction.md": "Do it.",
        "environment/Dockerfile": dockerfile + "WORKDIR /app\n",
        "solution/solve.sh": solve,
        "tests/test.sh": test,
    }.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


SOUND_TEST = "[ -e /app/done ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"


async def test_every_starter_task_is_sound(backend):
    reports = await check_all(task_directories(STARTER), backend, repeats=1, parallel=4)
    assert len(reports) >= 8
    assert {report.name: report.verdict for report in reports if not report.sound} == {}


async def test_what_is_unsound_is_said(backend, tmp_path):
    directories = [
        make_task(tmp_path / "sound", solve="touch /app/done\n", test=SOUND_TEST),
        make_task(tmp_path / "unsolved", solve="true\n", test=SOUND_TEST),
        make_task(tmp_path / "given", solve="touch /app/done\n", test="echo 1 > /logs/verifier/reward.txt\n"),
        make_task(tmp_path / "failing", solve="echo no >&2; exit 3\n", test=SOUND_TEST),
        make_task(tmp_path / "silent", solve="touch /app/done\n", test="echo nothing\n"),
        make_task(tmp_path / "built", solve="", test="", dockerfile="FROM debian\nRUN apt-get update\n"),
        make_task(tmp_path / "broken", solve="", test="", dockerfile="FROM debian\nRUN cat /nowhere\n"),
    ]
    reports = await check_all(directories, backend, repeats=1, parallel=4)
    verdicts = {report.name: report.verdict for report in reports}
    assert verdicts.pop("sound") == "sound"
    assert verdicts.pop("unsolved") == "the solution must score 1"
    assert verdicts.pop("given") == "doing nothing must score 0"
    assert verdicts.pop("failing") == "the solution: solve.sh ended with status 3: no"
    assert verdicts.pop("silent").startswith("the solution: The tests wrote neither")
    assert "apt-get" in verdicts.pop("built")
    assert "Line 2 of" in verdicts.pop("broken")
    assert not verdicts


async def test_a_flaky_task_is_named(backend, tmp_path):
    test = "n=$(od -An -N1 -tu1 /dev/urandom); echo $((n % 2)) > /logs/verifier/reward.txt\n"
    task = make_task(tmp_path / "flaky", solve="true\n", test=test)
    (report,) = await check_all([task], backend, repeats=8, parallel=4)  # wrong once in 2**14 times
    assert report.verdict.startswith("flaky: ")


@pytest.mark.parametrize(
    ("results", "flaky"),
    [((1.0, 1.0), False), ((1.0, 0.0), True), ((1.0, "an error"), True), (("one error", "another"), False)],
)
def test_flaky_is_what_differs(results, flaky):
    assert Trials(1.0, results).flaky == flaky


def test_the_first_fault_is_the_verdict():
    report = Report("x", Trials(1.0, (0.5, 0.5)), Trials(0.0, (1.0, 1.0)))
    assert report.verdict == "the solution must score 1"
    assert not report.sound


# --- the command line


@pytest.fixture
def run(sandboxes, monkeypatch):
    monkeypatch.setenv("TITOGYM_SANDBOXES", str(sandboxes))
    return lambda *arguments: CliRunner().invoke(app, ["env", *map(str, arguments)])


def test_check_prints_a_table_and_its_status_says_the_result(run, tmp_path):
    make_task(tmp_path / "good", solve="touch /app/done\n", test=SOUND_TEST)
    done = run("check", tmp_path)
    assert done.exit_code == 0
    assert "1 1 1" in done.output
    assert "0 0 0" in done.output
    make_task(tmp_path / "bad", solve="true\n", test=SOUND_TEST)
    done = run("check", tmp_path, "--repeats", 1)
    assert done.exit_code == 1
    assert "1 of 2 tasks are not sound: bad" in done.output


def test_list_names_everything(run):
    done = run("list")
    assert done.exit_code == 0
    for name in ("terminal", "shell", "csv-totals", "web-permissions"):
        assert name in done.output


def test_reap_says_what_it_did(run, sandboxes):
    me = owners.me()
    left = sandboxes / f"{me.namespace}-{me.pid}-{me.started - 1}-0123456789ab"
    (left / "root").mkdir(parents=True)
    done = run("reap")
    assert "local: destroyed 1 leftovers" in done.output
    assert not left.exists()
