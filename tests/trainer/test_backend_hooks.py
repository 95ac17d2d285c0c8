"""What algorithms need of a backend: the frozen start model, a value head, entropies. Real Megatron-core."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from safetensors import safe_open  # noqa: E402

from tests.trainer_backend.models import KINDS, reference  # noqa: E402
from titogym.trainer.backends.base import BackendSpec  # noqa: E402
from titogym.trainer.backends.process import TrainerProcess  # noqa: E402
from titogym.trainer.batch import TrainBatch  # noqa: E402
from titogym.trainer.config.sections import LossConfig, OptimizerConfig  # noqa: E402

pytestmark = pytest.mark.train

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    reference("qwen3-tied").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def trainer(model_dir, tmp_path_factory) -> Iterator[TrainerProcess]:
    spec = BackendSpec(
        optimizer=OptimizerConfig(lr=3e-3),
        loss=LossConfig(kl="loss", kl_coefficient=0.1, entropy_coefficient=0.01, value_coefficient=2.0),
        threads=1,
        microbatch_tokens=24,  # several microbatches
        reference=True,
        value_head=True,
    )
    process = TrainerProcess(spec, tmp_path_factory.mktemp("log") / "trainer.log")
    try:
        yield process
    finally:
        process.close()


def batch_of(model_dir: Path) -> TrainBatch:
    rng = np.random.default_rng(0)
    lengths = (9, 14, 11)
    vocabulary = KINDS["qwen3-tied"][1].vocab_size
    masks = []
    for n in lengths:
        mask = rng.integers(0, 2, n).astype(np.float32)
        mask[0], mask[-1] = 0, 1
        masks.append(mask)
    return TrainBatch(
        tokens=[rng.integers(0, vocabulary, n).astype(np.int32) for n in lengths],
        loss_mask=masks,
        rollout_logprobs=[np.full(n, -5.0, dtype=np.float32) for n in lengths],
        advantages=[rng.normal(size=n).astype(np.float32) for n in lengths],
        returns=[np.ones(n, dtype=np.float32) for n in lengths],
        lags=[np.full(n, lag, dtype=np.float32) for lag, n in enumerate(lengths)],
        temperature=TEMPERATURE,
    )


def test_reference_value_head_and_entropy_through_training_and_a_checkpoint(trainer, model_dir, tmp_path):
    batch = batch_of(model_dir)
    trainer.load_hf(model_dir)
    start = trainer.logprobs(batch)
    assert all(not values.any() for values in trainer.values(batch))
    batch.reference_logprobs = trainer.reference_logprobs(batch)
    for own, frozen in zip(start, batch.reference_logprobs, strict=True):
        np.testing.assert_array_equal(own, frozen)

    first = trainer.train_step(batch)
    assert first["loss/kl_reference"] == 0
    assert first["loss/value"] == pytest.approx(0.5)  # all values 0, all returns 1
    assert first["loss/entropy"] == pytest.approx(mean_entropy(batch), abs=1e-4)
    assert [first[f"tis/lag_{lag}/tokens"] for lag in (0, 1, 2)] == [m.sum() for m in batch.loss_mask]
    for _ in range(10):
        last = trainer.train_step(batch)
    assert last["loss/kl_reference"] > 1e-4
    assert last["loss/value"] < 0.25
    for frozen, again in zip(batch.reference_logprobs, trainer.reference_logprobs(batch), strict=True):
        np.testing.assert_array_equal(frozen, again)

    values = trainer.values(batch)
    assert np.mean([v[m > 0].mean() for v, m in zip(values, batch.loss_mask, strict=True)]) > 0.3
    trained = trainer.logprobs(batch)
    trainer.save(tmp_path / "checkpoint")
    trainer.train_step(batch)
    trainer.load(tmp_path / "checkpoint")
    again = [*trainer.values(batch), *trainer.logprobs(batch)]
    for before, after in zip([*values, *trained], again, strict=True):
        np.testing.assert_array_equal(before, after)

    trainer.save_hf(tmp_path / "hf")
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as weights:
        assert not [name for name in weights.keys() if "value" in name]  # noqa: SIM118 (not a mapping)


def mean_entropy(batch: TrainBatch) -> float:
    """Of the distributions that the masked tokens come from, by transformers in float64."""
    model = reference("qwen3-tied").double()
    entropies = []
    for tokens, mask in zip(batch.tokens, batch.loss_mask, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor(tokens, dtype=torch.long)[None]).logits[0] / TEMPERATURE
        logp = torch.log_softmax(logits, dim=-1)
        entropy = -(logp.exp() * logp).sum(dim=-1)
        entropies += [float(entropy[t - 1]) for t in np.flatnonzero(mask > 0)]
    return sum(entropies) / len(entropies)
