"""`titogym env reap`, and the directories of runs that were killed."""

import signal
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from titogym import scratch
from titogym.cli.main import app

HOLDER = """
import time
from titogym.scratch import scratch_directory
with scratch_directory("titogym-run") as directory:
    (directory / "journal").write_text("x")
    print(directory, flush=True)
    time.sleep(600)
"""


def test_a_directory_goes_with_its_process_or_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "titogym-run-notes").mkdir()  # somebody else's
    environment = {"TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as holder:
        assert holder.stdout is not None
        directory = Path(holder.stdout.readline().strip())
        with scratch.scratch_directory("titogym-run") as mine:
            assert directory.exists(), "a living run lost its directory"
            assert mine.exists()
        assert not mine.exists()
        holder.send_signal(signal.SIGKILL)
    assert directory.exists()
    done = CliRunner().invoke(app, ["env", "reap"])
    assert done.exit_code == 0, done.output
    assert "Deleted 1 directories of dead runs." in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["titogym-run-notes"]


def test_reaping_an_unknown_backend_is_one_sentence():
    done = subprocess.run(
        [sys.executable, "-m", "titogym", "env", "reap", "--sandbox", "cellar"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "There is no sandbox backend 'cellar'" in done.stderr
