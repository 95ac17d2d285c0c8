"""`titogym env`: list, check, run and init, as a person calls them."""

import os
import subprocess
import sys
import tomllib

import pytest
from typer.testing import CliRunner

from titogym.cli.main import app
from titogym.envs.sandboxes.base import SandboxError
from titogym.errors import UserError


def run(*words: str, **env: str):
    return CliRunner().invoke(app, ["env", *words], env={"COLUMNS": "150", **env})


def test_list_says_what_there_is_and_its_options():
    told = run("list")
    assert told.exit_code == 0, told.output
    for text in ("arithmetic", "level=1|2|3|4", "Text to SQL", "turn by turn, in a sandbox", "csv-totals"):
        assert text in told.output, text


def test_check_plays_the_tasks_of_a_generator():
    told = run("check", "guess?level=2&count=3", "--repeats", "2")
    assert told.exit_code == 0, told.output
    assert "All 3 tasks are sound" in told.output
    assert "1 1" in told.output


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("nope=1", "has no option 'nope'"),
        ("image=3", "cannot be made with image = 3"),
        ("labels=3", "cannot be made with labels = 3"),
    ],
)
def test_options_of_a_sandbox_that_do_not_fit_are_named(command, option, sentence):
    words = ["env", command, "arithmetic?count=1", "--sandbox", "docker", "--sandbox-option", option]
    with pytest.raises(UserError, match=sentence):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_check_says_what_has_no_reference(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "?", "answer": "x"}\n')
    told = run("check", str(path), "--repeats", "1")
    assert told.exit_code == 1
    assert "has no `reference`" in told.output


def test_check_says_once_what_keeps_every_task_from_being_checked(tmp_path, monkeypatch):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "?", "answer": "x"}\n{"question": "!", "answer": "y"}\n')
    told = run("check", str(path))
    assert told.exit_code == 1
    assert told.output.count("has no `reference`") == 1
    assert told.output.strip().startswith("None of the 2 tasks could be checked: ")

    monkeypatch.setattr("titogym.envs.arithmetic.Arithmetic.grade", _no_sandbox)
    told = run("check", "arithmetic?count=1")
    assert told.exit_code == 1
    assert told.output.strip() == "The task could not be checked: No container engine answers."


async def _no_sandbox(self, task, sandbox):
    raise SandboxError("No container engine answers.")


def test_check_and_run_say_what_an_environment_of_ones_own_fails_at(monkeypatch):
    monkeypatch.setattr("titogym.envs.arithmetic.Arithmetic.reference", lambda self: dict[str, str]()["next"])
    told = run("check", "arithmetic?count=1", "--repeats", "1")
    assert told.exit_code == 1
    assert "KeyError:" in told.output  # the table may wrap between the two
    assert "'next'" in told.output
    with pytest.raises(UserError, match="The environment 'arithmetic' failed: KeyError: 'next'"):
        CliRunner().invoke(app, ["env", "run", "arithmetic"], catch_exceptions=False)


def test_run_plays_one_task_and_shows_it():
    told = run("run", "arithmetic?level=3&split=test")
    assert told.exit_code == 0, told.output
    for text in ("user What is", 'calculate({"a": ', "tool ", "reward 1", "expected"):
        assert text in told.output, text
    assert "reward 0" in run("run", "arithmetic?level=3", "--nothing").output


@pytest.mark.sandbox
def test_run_solves_a_terminal_task(sandboxes):
    told = run("run", "shell?seed=3", TITOGYM_SANDBOXES=str(sandboxes))
    assert told.exit_code == 0, told.output
    assert "reward 1" in told.output


def test_init_writes_a_package_whose_tests_pass(tmp_path, monkeypatch):
    told = run("init", "my-words", "--in", str(tmp_path))
    assert told.exit_code == 0, told.output
    assert 'pip install -e ".[test]" && python -m pytest' in told.output
    folder = tmp_path / "my-words"
    extras = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["test"][0].startswith("pytest")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 passed" in done.stdout
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length", "110", "."]
    assert subprocess.run(ruff, cwd=folder, capture_output=True, check=False).returncode == 0
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(os.getcwd())
    assert "All 2 tasks are sound" in run("check", "my_words.tasks:tasks?level=3&count=2").output
    with pytest.raises(UserError, match="is there already"):
        raise run("init", "my-words", "--in", str(tmp_path)).exception


@pytest.mark.parametrize("name", ["My-Words", "3d", "class", "json", "titogym", "a/b", "", "Ä"])
def test_init_refuses_names_that_no_package_should_have(name, tmp_path):
    done = run("init", "--in", str(tmp_path), "--", name)
    assert isinstance(done.exception, UserError), done.output
    assert list(tmp_path.iterdir()) == []
