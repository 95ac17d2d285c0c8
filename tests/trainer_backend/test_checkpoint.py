"""Checkpoints continue a run exactly and survive a kill."""

import pytest
import torch

from tests.trainer_backend.models import SIZES, batch
from titogym.errors import UserError
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.megatron.backend import MegatronBackend
from titogym.trainer.config.sections import OptimizerConfig

pytestmark = pytest.mark.train
TINY = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": True, **SIZES}


def backend(dtype="float32", seed=0, **changes):
    made = MegatronBackend(BackendSpec(optimizer=OptimizerConfig(lr=1e-3, warmup_steps=6), dtype=dtype))
    made.init_random(TINY | changes, seed)
    return made


def steps(trained, numbers):
    return [trained.train_step(batch([40, 25, 60], seed=i)) for i in numbers]


def exact(metrics):
    """Everything but the timings."""
    return [{k: v for k, v in m.items() if not k.endswith("seconds")} for m in metrics]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_continues_bit_for_bit(dtype, tmp_path):
    unbroken = backend(dtype)
    steps(unbroken, range(3))
    unbroken.save(tmp_path)
    expected = steps(unbroken, range(3, 7))

    resumed = backend(dtype, seed=1)
    steps(resumed, range(2))  # whatever the optimizer held before must not matter
    resumed.load(tmp_path)
    assert resumed.step == 3
    assert exact(steps(resumed, range(3, 7))) == exact(expected)
    theirs = dict(unbroken.export())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in resumed.export())


def test_the_latest_save_wins_and_older_ones_go(tmp_path):
    trained = backend()
    for _ in range(2):
        steps(trained, [0])
        trained.save(tmp_path)
    trained.save(tmp_path)  # the same step twice
    (version,) = [item for item in tmp_path.iterdir() if item.is_dir()]
    assert version.name == (tmp_path / "latest").read_text()
    resumed = backend(seed=1)
    resumed.load(tmp_path)
    assert resumed.step == 2


def test_another_models_checkpoint_is_refused(tmp_path):
    backend().save(tmp_path)
    with pytest.raises(UserError, match=r"intermediate_size is 96.*is 128"):
        backend(intermediate_size=128).load(tmp_path)


def test_an_empty_path_is_refused(tmp_path):
    with pytest.raises(UserError, match="no complete checkpoint"):
        backend().load(tmp_path)
