"""A trainer of several ranks, from the driver's side: it works as one, and a lost rank is named."""

import os
import signal
import threading
import time

import psutil
import pytest

from tests.trainer_backend.ends import assert_gone
from tests.trainer_backend.models import TINY, batch
from titogym.errors import UserError
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.layout import Layout
from titogym.trainer.backends.megatron.backend import MegatronBackend
from titogym.trainer.backends.process import TrainerError, TrainerProcess
from titogym.trainer.config.sections import OptimizerConfig

pytestmark = pytest.mark.train
DATA = [30, 50, 41, 7]


def started(layout, log, timeout):
    spec = BackendSpec(optimizer=OptimizerConfig(lr=1e-2), threads=1, layout=layout, timeout=timeout)
    trainer = TrainerProcess(spec, log)
    trainer.init_random(TINY, 0)
    (other,) = [child for child in psutil.Process(trainer.pid).children() if "RANK" in child.environ()]
    assert other.environ()["RANK"] == "1"
    return trainer, other


def test_two_ranks_work_as_one_until_one_is_killed(tmp_path):
    trainer, other = started(Layout(data=2), tmp_path / "trainer.log", timeout=120)
    try:
        alone = MegatronBackend(BackendSpec(optimizer=OptimizerConfig(lr=1e-2), threads=1))
        alone.init_random(TINY, 0)
        made = batch(DATA)
        for _ in range(2):
            together, single = trainer.train_step(made), alone.train_step(made)
            assert together["loss/policy"] == pytest.approx(single["loss/policy"], rel=1e-5)
        for ours, theirs in zip(trainer.logprobs(made), alone.logprobs(made), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
        with pytest.raises(UserError, match=r"has no config\.json"):
            trainer.load_hf(tmp_path)
        with pytest.raises(TrainerError, match="no token of the batch carries loss"):
            trainer.train_step(made.subset([]))
        assert trainer.step() == 2

        first = psutil.Process(trainer.pid)
        kill = threading.Timer(1.0, os.kill, (other.pid, signal.SIGKILL))
        kill.start()
        begun = time.monotonic()
        with pytest.raises(TrainerError, match=r"rank 1 was killed by SIGKILL(.|\n)*trainer-rank1\.log"):
            [trainer.train_step(made) for _ in range(10_000)]
        assert time.monotonic() - begun < 60  # and not the 120 s that a collective may take
        with pytest.raises(TrainerError, match=r"The trainer process (ended|was killed)"):
            trainer.step()
        assert_gone(other, first)
    finally:
        trainer.close()


def test_a_rank_that_hangs_is_named_when_its_time_is_over_and_all_die_with_the_trainer(tmp_path):
    trainer, other = started(Layout(pipeline=2), tmp_path / "trainer.log", timeout=10)
    try:
        other.suspend()
        with pytest.raises(TrainerError, match="rank 1 did not answer in time"):
            trainer.train_step(batch(DATA))
    finally:
        trainer.close()
    assert_gone(other)
