"""Every layout of ranks computes what one rank computes, and goes on from any other's checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer_backend.models import reference_logprobs, save_reference
from tests.trainer_backend.rank_program import CASES, Case, data, reference, spec, steps
from titogym import processes
from titogym.errors import UserError
from titogym.trainer.backends.layout import Layout
from titogym.trainer.backends.megatron.backend import MegatronBackend

pytestmark = pytest.mark.train
# Four ranks take minutes on two cores: TITOGYM_TEST_LAYOUTS=all runs them too.
EVERY = os.environ.get("TITOGYM_TEST_LAYOUTS") == "all"
RUN = [case for case in CASES if EVERY or case.world <= 2]
CASE = pytest.mark.parametrize("case", RUN, ids=lambda case: case.name.replace(" ", "-"))


class Runs:
    """Single-rank runs, and those of all layouts of one world size, each done once and when asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.models: dict[str, Any] = {}
        self._references: dict[tuple[str, bool], dict[str, Any]] = {}
        self._worlds: dict[int, dict[str, Any]] = {}

    def reference(self, kind: str, routes: bool) -> dict[str, Any]:
        if kind not in self.models:
            self.models[kind] = save_reference(kind, self.directory / kind)
        if (kind, routes) not in self._references:
            self._references[kind, routes] = reference(kind, routes, self.directory)
        return self._references[kind, routes]

    def observed(self, case: Case) -> dict[str, Any]:
        if case.world not in self._worlds:
            for other in CASES:
                if other.world == case.world:
                    self.reference(other.kind, other.routes)
            launch(case.world, self.directory)
            found = (self.directory / f"results-{case.world}.json").read_text()
            self._worlds[case.world] = json.loads(found)
        found_case: dict[str, Any] = self._worlds[case.world][case.name]
        return found_case


def launch(world: int, directory: Path) -> None:
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.free_port())}
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainer_backend.rank_program", str(directory)]
    logs = [directory / f"rank{rank}.log" for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("wb") as sink:
            env = os.environ | common | {"RANK": str(rank), "OMP_NUM_THREADS": "1"}
            ranks.append(subprocess.Popen([*command, str(world)], env=env, stdout=sink, stderr=sink))
    try:
        for process in ranks:
            process.wait(240)
    finally:
        for process in ranks:
            process.kill()
    said = "\n".join(log.read_text()[-3000:] for log in logs)
    assert [process.returncode for process in ranks] == [0] * world, said


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("layouts"))


def assert_same(seen: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(seen) == len(expected)
    for ours, theirs in zip(seen, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if name != "trainer/microbatches" and not name.startswith("tis/histogram/"):
                assert ours[name] == pytest.approx(value, rel=2e-4, abs=2e-6), name


@CASE
def test_logprobs(case, runs):
    seen, expected = runs.observed(case), runs.reference(case.kind, case.routes)
    made = data(0, case.routes)
    theirs = expected["logprobs"]
    if not case.routes:
        theirs = reference_logprobs(runs.models[case.kind], made)
    for ours, row in zip(seen["logprobs"], theirs, strict=True):
        assert np.abs(np.subtract(ours, row)).max() <= 1e-4


@CASE
def test_steps_and_weights(case, runs):
    seen, expected = runs.observed(case), runs.reference(case.kind, case.routes)
    assert_same(seen["steps"], expected["steps"])
    assert seen["weights"] < 5e-5  # where a moment is near 0, rounding decides a step of AdamW
    assert len({metrics["loss/policy"] for metrics in seen["steps"]}) == 4
    if case.routes:
        assert all(metrics["r3/agreement"] == 1 for metrics in seen["steps"])
        assert all(0.1 < metrics["r3/own_agreement"] < 0.9 for metrics in seen["steps"])


@CASE
def test_export_is_exact(case, runs):
    assert runs.observed(case)["exact export"]


@CASE
def test_a_resume_is_exact_in_the_same_layout_and_close_from_another(case, runs):
    seen, expected = runs.observed(case), runs.reference(case.kind, case.routes)
    assert seen["resumed"] == seen["steps"][2:]
    if "resharded" in seen:
        assert_same(seen["resharded"], expected["steps"][2:])
    if "from TP2" in seen:
        assert_same(seen["from TP2"], expected["steps"][2:])


@pytest.mark.parametrize("name", ["TP2", "DP2", "EP2 dense layer", "TP2 EP2 ETP1", "PP2 R3", "FSDP 2"])
def test_one_rank_goes_on_from_many(name, runs):
    (case,) = [case for case in CASES if case.name == name]
    runs.observed(case)
    backend = case.backend(spec(case.kind, {"replay_routes": case.routes}))
    backend.load_hf(runs.directory / case.kind)
    backend.load(runs.directory / "checkpoints" / name)
    expected = runs.reference(case.kind, case.routes)
    assert_same(steps(backend, 2, 2, case.routes), expected["steps"][2:])


@pytest.mark.parametrize(
    ("kind", "layout", "named"),
    [
        ("qwen3-tied", Layout(tensor=4), "num_key_value_heads = 2"),
        ("qwen3-tied", Layout(pipeline=3), "num_hidden_layers = 2"),
        ("qwen3-tied", Layout(data=2, expert=2), "expert_parallel needs a mixture-of-experts model"),
        ("qwen3-moe", Layout(data=2, expert=4), "does not divide the 2 ranks"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused(kind, layout, named, runs, monkeypatch):
    from titogym.trainer.backends.megatron import backend, parallel

    runs.reference(kind, False)
    monkeypatch.setattr(backend, "join_world", lambda spec: torch.device("cpu"))
    monkeypatch.setattr(parallel, "arrange", lambda layout, timeout: None)
    with pytest.raises(UserError, match=named):
        MegatronBackend(spec(kind, {}, layout)).load_hf(runs.directory / kind)


def test_a_layout_needs_its_ranks(runs):
    runs.reference("qwen3-tied", False)
    with pytest.raises(UserError, match="TP2 needs 2 ranks, and there are 1"):
        MegatronBackend(spec("qwen3-tied", {}, Layout(tensor=2))).load_hf(runs.directory / "qwen3-tied")
