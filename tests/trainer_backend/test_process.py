"""The trainer as a process: what crosses the pipe, and what happens when it dies."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.trainer_backend.models import TINY, batch
from titogym.errors import UserError
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.process import TrainerError, TrainerProcess
from titogym.trainer.config.sections import OptimizerConfig
from titogym.trainer.learning.sft import SftConfig

pytestmark = pytest.mark.train
SPEC = BackendSpec(optimizer=OptimizerConfig(lr=1e-2), threads=1)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    made = TrainerProcess(SPEC, tmp_path_factory.mktemp("trainer") / "trainer.log")
    yield made
    made.close()


def test_batches_go_in_and_figures_come_out(trainer):
    trainer.init_random(TINY, 0)
    made = batch([30, 50])
    before = trainer.logprobs(made)
    assert [part.shape for part in before] == [(30,), (50,)]
    assert all((part[mask == 0] == 0).all() for part, mask in zip(before, made.loss_mask, strict=True))
    made.advantages = [np.ones_like(part) for part in before]
    metrics = trainer.train_step(made)
    assert metrics["optimizer/lr"] == 1e-2
    assert metrics["loss/tokens"] == sum(mask.sum() for mask in made.loss_mask)
    # every token had a positive advantage, so the step makes all of them together likelier
    assert sum(part.sum() for part in trainer.logprobs(made)) > sum(part.sum() for part in before)
    assert trainer.step() == 1


def test_fine_tuning_learns_and_reports_every_step(trainer):
    trainer.init_random(TINY, 0)
    rng = np.random.default_rng(0)
    examples = []
    for _ in range(64):  # the second half repeats the first; only it is learned
        half = rng.integers(0, 8, 6).tolist()
        examples.append((half + half, [0] * 6 + [1] * 6))
    seen = []
    config = SftConfig(epochs=12, tokens_per_step=200, lr=1e-2)
    final = trainer.sft(examples, config, lambda step, steps, m: seen.append((step, steps, m["loss/nll"])))
    assert [step for step, _, _ in seen] == list(range(1, seen[0][1] + 1))
    assert seen[0][2] > 4
    assert final["loss/nll"] == seen[-1][2] < 2.2  # it has found the 8 tokens, at least


def test_users_mistakes_come_back_as_such(trainer, tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json"):
        trainer.load_hf(tmp_path)


def test_failures_come_back_with_their_message_and_the_process_lives_on(trainer):
    trainer.init_random(TINY, 0)
    made = batch([20])
    made.loss_mask[0][:] = 0
    with pytest.raises(TrainerError, match="no token of the batch carries loss"):
        trainer.train_step(made)
    assert trainer.alive()
    assert len(trainer.logprobs(batch([20]))) == 1


def test_a_spec_that_does_not_start_is_an_error_of_every_call(tmp_path):
    broken = TrainerProcess(BackendSpec(backend="nonesuch"), tmp_path / "log")
    with pytest.raises(TrainerError, match="nonesuch"):
        broken.step()
    with pytest.raises(TrainerError, match="ended with status 0"):
        broken.step()
    broken.close()


def test_a_killed_trainer_is_named_and_a_save_it_was_in_leaves_the_checkpoint_before(trainer, tmp_path):
    config = TINY | {"vocab_size": 4096, "hidden_size": 512}  # big enough that a save takes a while
    killed = TrainerProcess(SPEC, tmp_path / "log")
    killed.init_random(config, 0)
    made = batch([30])
    killed.train_step(made)
    path = tmp_path / "checkpoint"
    killed.save(path)
    expected = killed.logprobs(made)
    killed.train_step(made)

    def kill_in_mid_save():
        while not list(path.glob("partial-*/*.distcp")):
            time.sleep(0.0005)
        os.kill(killed.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_in_mid_save)
    killer.start()
    with pytest.raises(TrainerError, match="was killed by SIGKILL"):
        killed.save(path)
    killer.join()
    with pytest.raises(TrainerError, match="SIGKILL"):
        killed.step()
    killed.close()
    assert list(path.glob("partial-*"))  # it was in the middle

    trainer.init_random(config, 1)
    trainer.load(path)
    assert trainer.step() == 1
    assert (trainer.logprobs(made)[0] == expected[0]).all()
    trainer.save(path)
    assert not list(path.glob("partial-*"))


DRIVER = """
import sys, time
from pathlib import Path
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.process import TrainerProcess
trainer = TrainerProcess(BackendSpec(), Path(sys.argv[1]))
assert "torch" not in sys.modules
print(trainer.pid, flush=True)
time.sleep(60)
"""


def test_the_driver_has_no_torch_and_the_trainer_dies_with_it(tmp_path):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the trainer outlived its driver"
        time.sleep(0.05)
