"""The real harness programs, unmodified, each in a real sandbox behind the real gateway.

The model is scripted: it has the program run commands, write and change a file, and send a sub-agent
where there are such tools. `TITOGYM_TEST_HARNESSES=all` also runs the programs that take minutes to
install or start.
"""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.harnesses import evidence
from titogym import npm, venvs
from titogym.errors import UserError
from titogym.gateway.trajectories import Trajectory
from titogym.harnesses.doctor import diagnose
from titogym.harnesses.examination import Run, examine
from titogym.harnesses.registry import harness
from titogym.harnesses.scripted_model import Sampled
from titogym.harnesses.specification import built_in, read

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(900)]

HEAVY = {"inspect_ai", "opencode", "openhands", "qwen_code", "smolagents", "terminus_2"}
ALL = os.environ.get("TITOGYM_TEST_HARNESSES") == "all"
RECORD = bool(os.environ.get("TITOGYM_RECORD_HARNESSES"))
NAMES = [name for name in evidence.names() if ALL or name not in HEAVY]
SECONDS = 300.0  # of one run, on a busy machine; a quiet one takes ten


@pytest.fixture(scope="module")
def installed() -> dict[str, str]:
    """Every program, installed at the same time; why one could not be, by its name."""

    def install(name: str) -> str:
        try:
            asyncio.run(harness(name).prepare())
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as pool:
        return dict(zip(NAMES, pool.map(install, NAMES), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_program_works_on_a_task_and_trains_token_exact(name: str, installed: dict[str, str]) -> None:
    least = read(built_in()[name]).install.python if name in built_in() else "3.11"
    if venvs.find_python(least) is None:
        pytest.skip(f"{name} WAS NOT TESTED: there is no Python {least} on this machine")
    if "install Node.js" in installed[name]:
        pytest.skip(f"{name} WAS NOT TESTED: {installed[name]}")
    assert installed[name] == ""
    run = asyncio.run(examine(harness(name), seconds=SECONDS))
    report = diagnose(run)
    assert (report.outcome, report.reward) == ("finished", 1.0), f"{report.detail}\n{report.log}"
    assert report.problems == []
    assert report.used == harness(name).matcher
    assert all(cause.startswith("harness: it rewrote") for cause in report.mismatches), report.mismatches
    _check_trajectories(run)
    now = evidence.seen(report)
    if RECORD:
        evidence.record(name, now)
    then = evidence.recorded()[name]
    assert now == {key: then[key] for key in now}


def _check_trajectories(run: Run) -> None:
    """Each generation, as the engine saw and gave it, stands in one trajectory, and carries loss once."""
    assert sum(sum(trajectory.loss_mask) for trajectory in run.trajectories) == sum(
        len(one.output) for one in run.model.sampled
    )
    for one in run.model.sampled:
        assert sum(_holds(trajectory, one) for trajectory in run.trajectories) == 1
    assert {trajectory.reward for trajectory in run.trajectories} == {run.reward}


def _holds(trajectory: Trajectory, one: Sampled) -> bool:
    row = (*one.prompt, *one.output)
    trained = trajectory.loss_mask[len(one.prompt) : len(row)]
    return tuple(trajectory.tokens[: len(row)]) == row and all(trained)


@pytest.mark.parametrize("name", built_in())
def test_what_is_written_about_a_program_is_what_was_seen(name: str) -> None:
    one = evidence.recorded()[name]
    assert one["token_exact"]
    assert one["version"] == evidence.version(name), "its version changed: record it anew"
    specification = read(built_in()[name])
    assert (specification.protocol, specification.matcher) == (*one["protocols"], one["declared"])
    assert specification.policy in (one["policy"], "branching")


def test_the_page_says_what_was_recorded() -> None:
    text = evidence.PAGE.read_text(encoding="utf-8")
    assert evidence.page(text) == text, "run: python -m tests.harnesses.evidence"


def test_a_program_for_another_python_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(venvs, "find_python", lambda least: None)
    with pytest.raises(UserError, match=r"needs Python 3\.12 or newer"):
        asyncio.run(harness("terminus_2").prepare())


def test_a_program_of_npm_needs_npm(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> None:
    monkeypatch.setenv("TITOGYM_HOME", str(tmp_path))
    monkeypatch.setattr(npm.shutil, "which", lambda program, path=None: None)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"install Node\.js"):
        asyncio.run(harness("codex").prepare())
