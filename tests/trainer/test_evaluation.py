"""Where evaluation may take place: every score belongs to the weights that earned it, however late."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from tests.doubles.scripted_engine import ScriptedEngine
from tests.trainer.test_asynchronous import Case, raise_at
from tests.trainer.worlds import ACTIONS, Engine, World, episode, softmax
from titogym.errors import UserError
from titogym.trainer.drivers.parts import Parts
from titogym.trainer.evaluation import DedicatedEngines
from titogym.trainer.runs.directory import RunDirectory


class EvalWorld:
    """Engines of evaluation's own: they have the weights of the snapshot that was loaded last."""

    def __init__(self, delay: float = 0.0) -> None:
        self.engine = Engine()
        self.delay = delay
        self.loaded: list[int] = []

    def load(self, model_dir: Path, version: int) -> None:
        self.engine.logits = np.load(model_dir / "logits.npy")
        self.engine.version = str(version)
        self.loaded.append(version)

    def verify(self, version: int) -> None:
        assert self.engine.version == str(version)

    async def run_episode(self, task, labels):
        await asyncio.sleep(self.delay)
        score = float(softmax(self.engine.logits)[ACTIONS - 1])
        return episode(task, ACTIONS - 1, version=self.engine.version, reward=score)


class Dedicated(Case):
    def __init__(self, directory: Path, **changes) -> None:
        place = {"eval__place": "dedicated", "eval__urls": ["http://127.0.0.1:1"], "eval__every": 2}
        super().__init__(directory, **{**place, **changes})
        self.evaluation = EvalWorld()

    def parts(self, check_health) -> Parts:
        from dataclasses import replace

        return replace(
            super().parts(check_health),
            run_eval_episode=self.evaluation.run_episode,
            eval_engines=self.evaluation,
        )


async def test_dedicated_engines_score_each_version_while_training_goes_on(tmp_path):
    case = Dedicated(tmp_path)
    case.evaluation.delay = 0.02
    expected = {}

    def remember(call: str) -> None:
        if call.startswith("publish"):
            logits = case.trainer.logits
            expected[int(call.split()[1])] = float(softmax(logits)[ACTIONS - 1])

    case.trainer.on_call = remember
    run = await case.go()
    assert case.evaluation.loaded == [0, 2, 4, 6]
    for record in run.evaluations():
        assert record["score"] == pytest.approx(expected[record["version"]])
        assert record["versions"] == [str(record["version"])]
    assert max(r["at_step"] - r["version"] for r in run.evaluations()) > 0  # it was late, and says so
    assert not list(run.evaluation_snapshots.glob("step-*"))


async def test_a_version_that_was_not_scored_before_a_kill_is_scored_after_the_resume(tmp_path):
    first = Dedicated(tmp_path)
    first.evaluation.delay = 10
    first.trainer.on_call = raise_at("publish 3", "killed")
    with pytest.raises(RuntimeError, match="killed"):
        await first.go()
    assert RunDirectory(tmp_path).evaluations() == []
    assert RunDirectory(tmp_path).evaluation_snapshots_taken() == [0, 2]
    run = await Dedicated(tmp_path).go(resume=True)
    assert [r["version"] for r in run.evaluations()] == [0, 2, 4, 6]
    assert run.evaluations()[0]["score"] == pytest.approx(0.25)


@pytest.mark.parametrize("resumed_at", [0, 6])
async def test_a_version_that_is_due_again_anyway_is_scored_once(tmp_path, resumed_at):
    first = Dedicated(tmp_path, run__steps=6)
    if resumed_at == 0:
        first.trainer.on_call = raise_at("publish 1", "killed")
        first.evaluation.delay = 10
        with pytest.raises(RuntimeError, match="killed"):
            await first.go()
    else:
        await first.go()
        run = RunDirectory(tmp_path)
        run.eval_path.write_text("".join(run.eval_path.read_text().splitlines(keepends=True)[:-1]))
        snapshot = run.evaluation_snapshots / "step-000006"
        snapshot.mkdir()
        np.save(snapshot / "logits.npy", first.trainer.logits)
    run = await Dedicated(tmp_path, run__steps=6).go(resume=True)
    assert [r["version"] for r in run.evaluations()] == [0, 2, 4, 6]


async def test_external_scores_count_for_their_step_even_after_the_run(tmp_path):
    run = await Case(tmp_path, eval__place="external", eval__every=3).go()
    assert run.evaluations() == []
    assert run.evaluation_snapshots_taken() == [0, 3, 6]
    np.testing.assert_array_equal(
        np.load(run.evaluation_snapshots / "step-000006" / "logits.npy"), np.load(run.model / "logits.npy")
    )
    (run.evaluation_snapshots / "step-000006.json").write_text('{"score": 0.75}')
    (run.evaluation_snapshots / "step-000003.json").write_text('{"score": 0.5, "tasks": 7}')
    assert [(e["version"], e["score"], e["tasks"]) for e in run.evaluations()] == [(3, 0.5, 7), (6, 0.75, 0)]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"score": "good"}', '{"score": null}'])
def test_an_external_score_that_is_none_is_named(tmp_path, content):
    run = RunDirectory(tmp_path)
    run.evaluation_snapshots.mkdir()
    (run.evaluation_snapshots / "step-000003.json").write_text(content)
    with pytest.raises(UserError, match=r"step-000003\.json is no evaluation"):
        run.evaluations()


async def test_snapshots_and_scores_of_forgotten_steps_are_forgotten(tmp_path):
    first = Case(tmp_path, eval__place="external", eval__every=1, checkpoint__every=2)
    first.trainer.on_call = raise_at("publish 4", "killed")
    with pytest.raises(RuntimeError, match="killed"):
        await first.go()
    run = RunDirectory(tmp_path)
    for version in (1, 3):
        (run.evaluation_snapshots / f"step-{version:06d}.json").write_text('{"score": 1}')
    RunDirectory.reopen(tmp_path, first.config).release()
    assert run.evaluation_snapshots_taken() == [0, 1, 2]
    assert [e["version"] for e in run.evaluations()] == [1]


def test_every_dedicated_engine_must_have_the_version(tmp_path):
    with ScriptedEngine(lambda prompt, params: [1]) as one, ScriptedEngine(lambda prompt, params: [1]) as two:
        engines = DedicatedEngines([one.url, two.url])
        engines.load(tmp_path, 7)
        assert (one.weight_version, two.weight_version) == ("7", "7")
        two.weight_version = "8"  # somebody else's update
        with pytest.raises(UserError, match=f"{two.url} has weight version '8' in place of 7"):
            engines.verify(7)
    with pytest.raises(UserError, match="did not load version 8"):
        engines.load(tmp_path, 8)


async def test_a_score_of_mixed_weights_is_told(tmp_path, monkeypatch):
    case = Case(tmp_path, run__steps=2)
    original = World.run_eval_episode

    async def mixed(self, task, labels):
        result = await original(self, task, labels)
        result.trajectories[0].version_spans = [(3, 4, "0"), (4, 5, "1")]
        return result

    monkeypatch.setattr(World, "run_eval_episode", mixed)
    run = await case.go()
    told = [e for e in run.events() if e["kind"] == "evaluation_of_mixed_weights"]
    assert json.dumps(told[0]["versions"]) == '["0", "1"]'
