"""Trainer and real SGLang: the same log-probs, every tensor after an update, requests across an update."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.engines.fixtures import VOCABULARY, build_tiny_model
from titogym.gateway.engines.base import Finish, SamplingParams
from titogym.gateway.engines.control import EngineControl
from titogym.gateway.engines.digests import Weight, differing_weights
from titogym.gateway.engines.launch import EngineOptions, EngineProcess, running
from titogym.gateway.engines.sglang import SGLangEngine
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.process import TrainerError, TrainerProcess
from titogym.trainer.batch import TrainBatch
from titogym.trainer.config.sections import OptimizerConfig
from titogym.trainer.weights.settings import WeightSettings

pytestmark = [pytest.mark.train, pytest.mark.engine, pytest.mark.timeout(600)]
SETTINGS = WeightSettings(timeout=60)


@dataclass
class World:
    trainer: TrainerProcess
    engine: EngineProcess
    control: EngineControl
    config: dict[str, Any]
    version: int = 0

    def publish(self) -> dict[str, float]:
        self.version += 1
        return self.trainer.publish_weights(self.version)

    def change_weights(self) -> None:
        """New random weights and a step on them: unmistakably others than the engine's."""
        self.trainer.init_random(self.config, self.version + 1)
        tokens = np.random.default_rng(self.version).integers(0, VOCABULARY, 64).tolist()
        self.trainer.train_step(scored([(tokens, 1, [-7.0] * 63)]))


def scored(sequences: list[tuple[list[int], int, list[float]]], temperature: float = 1.0) -> TrainBatch:
    """A batch of (tokens, prompt length, the engine's log-probs of the rest)."""
    made = TrainBatch([], [], [], [], temperature=temperature)
    for tokens, prompt, logprobs in sequences:
        mask = np.zeros(len(tokens), dtype=np.float32)
        mask[prompt:] = 1
        made.tokens.append(np.asarray(tokens, dtype=np.int32))
        made.loss_mask.append(mask)
        made.rollout_logprobs.append(np.asarray([0.0] * prompt + logprobs, dtype=np.float32))
        made.advantages.append(mask.copy())
    return made


def connect(model: Path, engine: EngineProcess, log: Path, dtype: Literal["float32", "bfloat16"]) -> World:
    spec = BackendSpec(optimizer=OptimizerConfig(lr=3e-3), dtype=dtype, threads=1)
    trainer = TrainerProcess(spec, log)
    trainer.load_hf(model)
    trainer.connect_engines([engine.url], SETTINGS)
    config = json.loads((model / "config.json").read_text())
    return World(trainer, engine, EngineControl(engine.url), config)


@pytest.fixture(scope="module")
def world(tiny_model, sglang_server, tmp_path_factory) -> Iterator[World]:
    made = connect(tiny_model, sglang_server, tmp_path_factory.mktemp("trainer") / "log", "float32")
    before = made.control.info().weight_version
    yield made
    made.control.update_from_disk(str(tiny_model), before)
    made.trainer.close()


async def sample(url: str, prompts: list[list[int]], n: int, temperature: float, on_chunk=lambda: None):
    """Completions of all prompts at once: (ids, log-probs, finish) for each."""
    engine = SGLangEngine(url)
    params = SamplingParams(max_new_tokens=n, temperature=temperature, ignore_eos=True)

    async def one(number: int, prompt: list[int]) -> tuple[list[int], list[float], Finish]:
        ids: list[int] = []
        logprobs: list[float] = []
        async for chunk in engine.generate(prompt, params, rid=f"r{time.time_ns()}-{number}", stream=True):
            ids += chunk.output_ids
            logprobs += chunk.logprobs
            on_chunk()
            if chunk.finish is not None:
                return ids, logprobs, chunk.finish
        raise AssertionError("no finish")

    try:
        return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))
    finally:
        await engine.close()


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, rng.integers(5, 60)).tolist() for _ in range(count)]


def gap(world: World, temperature: float) -> float:
    """Mean |trainer - engine| over tokens that the engine has just sampled."""
    asked = prompts(8, seed=1)
    answers = asyncio.run(sample(world.engine.url, asked, 48, temperature))
    made = scored(
        [(p + ids, len(p), lp) for p, (ids, lp, _) in zip(asked, answers, strict=True)], temperature
    )
    recomputed = world.trainer.logprobs(made)
    differences = [
        np.abs(ours - theirs)[mask > 0]
        for ours, theirs, mask in zip(recomputed, made.rollout_logprobs, made.loss_mask, strict=True)
    ]
    assert sum(map(len, differences)) == 8 * 48
    return float(np.concatenate(differences).mean())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_agree_in_float32(world, temperature):
    world.publish()
    assert gap(world, temperature) <= 1e-4
    world.change_weights()
    assert gap(world, temperature) > 1e-2  # the engine has the old weights: the measure does see it
    world.publish()
    assert gap(world, temperature) <= 1e-4


def test_every_tensor_arrives_over_noise(world, tmp_path):
    control = world.control
    world.change_weights()
    world.trainer.save_hf(tmp_path)
    control.update_from_disk(str(tmp_path), "from-disk")  # the engine's own loader is the witness
    control.set_weight_version(str(world.version))  # else the trainer refuses what others have updated
    expected = control.weight_digests()
    control.randomize_weights()
    noise = control.weight_digests()
    assert all(noise[name] != digest for name, digest in expected.items())
    figures = world.publish()
    arrived = control.weight_digests()
    wrong = [name for name, digest in expected.items() if arrived[name] != digest]
    assert not wrong
    exported = [
        Weight(n, t.shape, t.numpy().tobytes()) for n, t in load_file(tmp_path / "model.safetensors").items()
    ]
    assert differing_weights(arrived, exported) == []
    assert len(expected) >= 15
    assert figures["publish/bytes"] == sum(len(weight.data) for weight in exported)
    assert control.info().weight_version == str(world.version)


@pytest.mark.parametrize("mover", ["handoff", "disk", "p2p"])
def test_every_mover_brings_every_tensor_and_the_version(world, tiny_model, tmp_path, mover):
    trainer, control = world.trainer, world.control
    settings = WeightSettings(mover=mover, timeout=60, directory=tmp_path / "weights", model_dir=tiny_model)
    trainer.connect_engines([world.engine.url], settings)
    try:
        world.change_weights()
        assert trainer.check_weight_update()["publish/tensors_checked"] >= 15
        for _ in range(2):  # whole, then what changed
            world.change_weights()
            world.publish()
            trainer.save_hf(tmp_path / str(world.version))
            exported = load_file(tmp_path / str(world.version) / "model.safetensors")
            weights = [Weight(n, t.shape, t.numpy().tobytes()) for n, t in exported.items()]
            assert differing_weights(control.weight_digests(), weights) == []
            assert control.info().weight_version == str(world.version)
        assert gap(world, 1.0) <= 1e-4
    finally:
        trainer.connect_engines([world.engine.url], SETTINGS)


def test_a_request_in_flight_goes_on_under_the_new_weights(world):
    world.publish()
    asked = prompts(3, seed=2)
    old = world.version
    total = 400

    async def run():
        begun = asyncio.Event()
        seen = 0

        def chunk():
            nonlocal seen
            seen += 1
            if seen >= 60:
                begun.set()

        async def update():
            await begun.wait()
            await asyncio.to_thread(world.change_weights)
            return await asyncio.to_thread(world.publish)

        return await asyncio.gather(sample(world.engine.url, asked, total, 1.0, chunk), update())

    answers, figures = asyncio.run(run())
    new = world.version
    assert new == old + 1
    for _, _, finish in answers:
        spans = [(span.start, span.end, span.version) for span in finish.version_spans]
        assert [version for _, _, version in spans] == [str(old), str(new)]
        assert spans[0][0] == 0
        assert spans[0][1] == spans[1][0]
        assert spans[1][1] == total
        assert min(end - start for start, end, _ in spans) > 10

    made = scored([(p + ids, len(p), lp) for p, (ids, lp, _) in zip(asked, answers, strict=True)])
    under_new = world.trainer.logprobs(made)
    for prompt, ours, theirs, (_, _, finish) in zip(
        asked, under_new, made.rollout_logprobs, answers, strict=True
    ):
        switch = len(prompt) + finish.version_spans[0].end
        difference = np.abs(ours - theirs)
        # after the switch every key and value is of the new weights, so the new weights explain each token
        assert difference[switch:].mean() <= 1e-4
        assert difference[len(prompt) : switch].mean() > 1e-2
    assert figures["publish/seconds"] < 30


def test_bfloat16_on_both_sides_and_then_a_dead_engine(tmp_path):
    trainer = TrainerProcess(BackendSpec(dtype="bfloat16", threads=1), tmp_path / "trainer.log")
    build_tiny_model(tmp_path)
    # The gap is the rounding of activations and logits, so it grows with them: with weights of a standard
    # deviation of 0.1 it is 5e-3, and both sides are as far from float32 as from each other.
    config = json.loads((tmp_path / "config.json").read_text()) | {"initializer_range": 0.02}
    trainer.init_random(config, 0, tmp_path)
    trainer.save_hf(tmp_path / "model")
    trainer.close()
    options = EngineOptions(str(tmp_path / "model"), dtype="bfloat16", max_total_tokens=16384, seed=0)
    with running(options, tmp_path / "engine.log") as engine:
        world = connect(tmp_path / "model", engine, tmp_path / "trainer.log", "bfloat16")
        world.publish()
        assert gap(world, 1.0) <= 1e-3

        os.kill(engine.child.pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(TrainerError, match="engines could not be given new weights"):
            world.publish()
        assert time.monotonic() - start < SETTINGS.timeout + 10
        assert world.trainer.alive()
        world.trainer.close()
