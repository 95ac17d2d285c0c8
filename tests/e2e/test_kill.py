"""SIGKILL of each process of a real run, in mid-episode: nothing stays behind, and the run goes on."""

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.killed_run import GROUPS_PER_STEP, Run, assert_gone, command_line, listening, write_config
from tests.trainer.accounts import assert_groups_accounted_for

pytestmark = [pytest.mark.engine, pytest.mark.train, pytest.mark.sandbox, pytest.mark.timeout(900)]

OPTIONS = ("--set", "engine.dtype=float32", "--set", "run.keep_batches=true")


@pytest.fixture
def run(tiny_model: Path) -> Iterator[Run]:
    directory = Path(tempfile.mkdtemp(prefix="titogym-kill-"))
    directory.chmod(0o755)  # every sandbox has a user of its own
    write_config(directory, tiny_model)
    started = Run(directory)
    yield started
    started.stop()
    shutil.rmtree(directory)


def test_kill_everything_then_finish(run: Run) -> None:
    driver = run.start(*OPTIONS)
    run.wait_for_step(2)
    for victim, name in (
        ("sglang.launch_server", "engine"),
        ("serve", "gateway"),
        ("titogym.trainer.backends.worker", "trainer"),
    ):
        run.wait_for_an_episode()
        killed = [child for child in run.descendants() if victim in command_line(child)]
        assert len(killed) == 1
        killed[0].kill()
        step = run.records.metrics()[-1]["step"]
        run.wait_for_step(step + 3)  # the run goes on with another one
        assert f"Replaced the {name}" in run.output
        assert driver.poll() is None
    # Whatever replaced an engine served nothing before it had the weights.
    for record in run.records.metrics():
        assert record["staleness/coverage"] == 1.0

    run.wait_for_an_episode()
    children = run.descendants()
    ports = listening(children)
    assert len(ports) >= 2  # engine and gateway
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert_gone(children, ports)
    step = max(run.records.checkpoints())
    assert run.start("--resume", *OPTIONS, "--set", f"run.steps={step + 4}").wait(400) == 0, run.output
    assert len(run.records.metrics()) == step + 4
    assert_groups_accounted_for(run.records, GROUPS_PER_STEP)
    assert run.sandboxes() == []
    assert (run.records.model / "model.safetensors").exists()
