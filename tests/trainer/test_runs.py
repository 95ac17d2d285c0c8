"""Run directories that were damaged, cannot be made, or have no room left."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from titogym.errors import UserError
from titogym.trainer import training
from titogym.trainer.config.file import parse_config
from titogym.trainer.config.sections import RunConfig
from titogym.trainer.runs.directory import RunDirectory


def config(directory: str, steps: int = 1) -> RunConfig:
    tables = {"run": {"dir": directory, "steps": steps}, "model": {"dir": "m"}}
    return parse_config({**tables, "environment": {"source": "shell"}})


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"step": 3}', b"\xff"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    run = RunDirectory(tmp_path)
    path = run.save_checkpoint(7, {"ledger": {}}, lambda trainer: trainer.mkdir(), keep=2)
    assert run.load_state(7) == {"step": 7, "ledger": {}}
    (path / "state.json").write_bytes(content)
    with pytest.raises(UserError, match="step-000007 is damaged: delete it"):
        run.load_state(7)


@pytest.mark.parametrize("directory", ["/proc/run", "/dev/null/run", "a\0b", "x" * 300])
def test_a_directory_that_cannot_be_made_is_named(directory: str) -> None:
    with pytest.raises(UserError, match=r"Cannot write to run\.dir"):
        RunDirectory.create(Path(directory), config(directory))


def test_the_state_says_what_became_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run = RunDirectory.create(path, config(str(path), steps=3))
    seen = RunDirectory(path)
    assert seen.state() == "starting"
    run.write_status({"phase": "training"})
    assert seen.state() == "running"
    run.add_metrics({"step": 1})
    run.release()  # as a kill does: the status stays
    assert seen.state() == "stopped at 1"
    run = RunDirectory.reopen(path, config(str(path), steps=3))
    run.clear_status()
    assert seen.state() == "starting"
    run.add_metrics({"step": 3})
    assert seen.state() == "ending"
    run.release()
    assert seen.state() == "stopped at 3"  # its model was not saved
    run.model.mkdir()
    assert seen.state() == "done"


def test_a_full_disk_is_told_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def full(*_: object) -> Iterator[None]:
        raise OSError(errno.ENOSPC, "No space left on device", "checkpoints/step-000001")
        yield

    monkeypatch.setattr(training, "prepare", lambda config: None)
    monkeypatch.setattr("titogym.trainer.services.running", full)
    with pytest.raises(UserError, match=r"write to checkpoints/step-000001: No space left .*--resume"):
        training.run_training(config(str(tmp_path / "run")), Console(quiet=True))
