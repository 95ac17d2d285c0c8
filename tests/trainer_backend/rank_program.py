"""What every rank of `test_layouts` runs: all layouts of one world size, one after another.

Starting ranks costs far more than what they do here, so one start serves all. Rank 0 writes what it saw to
`results.json` in the directory of the test, where the single-rank run has left what to compare with.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.trainer_backend.models import EXPERTS, TOP_K, batch
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.fsdp.backend import FsdpBackend
from titogym.trainer.backends.layout import Layout
from titogym.trainer.backends.megatron.backend import MegatronBackend
from titogym.trainer.backends.steps import SteppingBackend
from titogym.trainer.batch import TrainBatch
from titogym.trainer.config.sections import LossConfig, OptimizerConfig


@dataclass(frozen=True)
class Case:
    name: str
    kind: str  # of `models.KINDS`
    layout: Layout
    routes: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    backend: type[SteppingBackend] = MegatronBackend

    @property
    def world(self) -> int:
        return self.layout.world


CASES = [
    Case("TP2", "qwen3-tied", Layout(tensor=2)),
    Case("PP2", "qwen3-tied", Layout(pipeline=2)),
    Case("CP2", "qwen3-tied", Layout(context=2), changes={"recompute": True}),
    Case("DP2", "qwen3-tied", Layout(data=2)),
    Case("PP2 Llama", "llama-untied", Layout(pipeline=2), changes={"recompute": True}),
    Case("EP2 dense layer", "qwen3-moe-mixed", Layout(data=2, expert=2)),
    Case("TP2 EP2 ETP1", "qwen3-moe", Layout(tensor=2, expert=2, expert_tensor=1)),
    Case("EP2 R3", "qwen3-moe", Layout(data=2, expert=2), routes=True),
    Case("TP2 R3", "qwen3-moe", Layout(tensor=2), routes=True, changes={"recompute": True}),
    Case("CP2 EP2 R3", "qwen3-moe", Layout(context=2, expert=2), routes=True),
    Case("PP2 R3", "qwen3-moe-mixed", Layout(pipeline=2), routes=True, changes={"recompute": True}),
    Case("FSDP 2", "qwen3-tied", Layout(data=2), backend=FsdpBackend),
    Case("TP2 PP2", "qwen3-tied", Layout(tensor=2, pipeline=2)),
    Case("TP2 CP2", "llama-untied", Layout(tensor=2, context=2)),
    Case(
        "PP2 EP2 DP2 R3",
        "qwen3-moe",
        Layout(pipeline=2, data=2, expert=2),
        routes=True,
        changes={"recompute": True},
    ),
]


def spec(kind: str, changes: dict[str, Any], layout: Layout | None = None) -> BackendSpec:
    return BackendSpec(
        value_head=kind == "llama-untied",
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1, warmup_steps=2),
        loss=LossConfig(entropy_coefficient=0.01),
        microbatch_tokens=100,
        threads=1,
        timeout=60.0,
        layout=layout or Layout(),
        **changes,
    )


def data(seed: int, routes: bool) -> TrainBatch:
    # The last step has one sequence only, so that some data ranks have nothing to score.
    made = batch([3, 60, 17, 90, 2, 41, 33] if seed < 3 else [50], seed=seed, temperature=0.7)
    rng = np.random.default_rng(seed + 100)
    made.returns = [rng.normal(size=len(row)).astype(np.float32) for row in made.tokens]
    if routes:
        made.routes = [
            np.argsort(rng.random((len(row) - 1, 2, EXPERTS)), axis=-1)[..., :TOP_K].astype(np.uint8)
            for row in made.tokens
        ]
    return made


def steps(backend: SteppingBackend, first: int, count: int, routes: bool) -> list[dict[str, float]]:
    """Metrics without timings."""
    seen = [backend.train_step(data(seed, routes)) for seed in range(first, first + count)]
    return [{k: v for k, v in metrics.items() if not k.endswith("seconds")} for metrics in seen]


def reference(kind: str, routes: bool, directory: Path) -> dict[str, Any]:
    """The same with one rank: what every layout has to see, with its checkpoint after two steps."""
    backend = MegatronBackend(spec(kind, {"replay_routes": routes}))
    backend.load_hf(directory / kind)
    where = directory / f"{kind}-{routes}"
    logprobs = [row.tolist() for row in backend.logprobs(data(0, routes))]
    seen = steps(backend, 0, 2, routes)
    backend.save(where / "checkpoint")
    seen += steps(backend, 2, 2, routes)
    save_file({name: tensor.clone() for name, tensor in backend.export()}, where / "after.safetensors")
    return {"logprobs": logprobs, "steps": seen}


def observe(case: Case, directory: Path) -> dict[str, Any]:
    expected = directory / f"{case.kind}-{case.routes}"
    backend = case.backend(spec(case.kind, case.changes | {"replay_routes": case.routes}, case.layout))
    backend.load_hf(directory / case.kind)
    seen: dict[str, Any] = {}
    loaded = load_file(directory / case.kind / "model.safetensors")
    exported = dict(backend.export())
    seen["exact export"] = exported.keys() == loaded.keys() and all(
        torch.equal(loaded[name], tensor) for name, tensor in exported.items()
    )
    seen["logprobs"] = [row.tolist() for row in backend.logprobs(data(0, case.routes))]
    seen["steps"] = steps(backend, 0, 2, case.routes)
    own = directory / "checkpoints" / case.name
    backend.save(own)
    seen["steps"] += steps(backend, 2, 2, case.routes)
    after = load_file(expected / "after.safetensors")
    seen["weights"] = max(float((after[name] - tensor).abs().max()) for name, tensor in backend.export())
    backend.load(own)
    seen["resumed"] = steps(backend, 2, 2, case.routes)
    if case.backend is FsdpBackend:  # it has a format of its own
        return seen
    backend.load(expected / "checkpoint")
    seen["resharded"] = steps(backend, 2, 2, case.routes)
    if (other := directory / "checkpoints" / "TP2").exists() and case.kind == "qwen3-tied":
        backend.load(other)
        seen["from TP2"] = steps(backend, 2, 2, case.routes)
    return seen


def main(directory: Path) -> None:
    results: dict[str, Any] = {}
    world = None
    for case in CASES:
        world = world or int(sys.argv[2])
        if case.world == world:
            started = time.perf_counter()
            results[case.name] = observe(case, directory)
            results[case.name]["seconds"] = time.perf_counter() - started
    if dist.get_rank() == 0:
        (directory / f"results-{world}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
