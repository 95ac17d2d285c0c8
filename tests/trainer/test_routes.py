"""Expert routes on their way from trajectory to batch."""

import numpy as np
import pytest

from tests.doubles.scripted_engine import ScriptedEngine
from titogym.errors import UserError
from titogym.gateway.routes import RouteShape
from titogym.gateway.trajectories import Trajectory
from titogym.harnesses.episode import EpisodeResult
from titogym.trainer import services
from titogym.trainer.batch import Group, Sample
from titogym.trainer.config.sections import AlgorithmSection
from titogym.trainer.learning.collate import train_batch
from titogym.trainer.rollout.worker import samples_of
from titogym.trainer.runs.storage import read_groups, write_groups

ROWS = np.arange(4 * 3 * 2).reshape(4, 3, 2)  # four tokens, three layers, two experts each


def episode(experts: int) -> EpisodeResult:
    wire = (ROWS % experts).astype("<i4").tobytes()
    shape = RouteShape(layers=3, top_k=2, experts=experts)
    trajectory = Trajectory(
        session_id="s",
        leaf="1",
        tokens=[1, 2, 3, 4, 5],
        loss_mask=[0, 0, 1, 1, 1],
        logprobs=[0.0, 0.0, -1.0, -1.0, -1.0],
        version_spans=[(2, 5, "0")],
        turns=1,
        finish_reason="stop",
        routes=shape.routes(shape.pack(wire, 4)),
    )
    return EpisodeResult("t", "finished", reward=1.0, trajectories=[trajectory])


@pytest.mark.parametrize(("experts", "dtype"), [(24, np.uint8), (256, np.uint8), (300, np.uint16)])
def test_routes_reach_the_batch_in_as_few_bytes_as_hold_them(experts, dtype, tmp_path):
    samples = samples_of(episode(experts), 0) + samples_of(episode(experts), 1)
    groups = [Group("t", samples)]
    write_groups(tmp_path / "groups.safetensors", groups)  # as a checkpoint keeps them
    batch = train_batch(read_groups(tmp_path / "groups.safetensors"), AlgorithmSection(), 1.0)
    assert batch.routes is not None
    for rows in batch.routes:
        assert rows.dtype == dtype
        assert (rows == ROWS % experts).all()
    (second,) = batch.subset([1]).routes or []
    assert (second == batch.routes[1]).all()


def test_without_routes_the_batch_has_none_and_some_are_not_enough():
    with_routes = samples_of(episode(24), 0)
    without = [Sample([1, 2, 3], [0, 1, 1], [0.0, -1.0, -1.0], [(1, 3, "0")], 0.0)]
    assert train_batch([Group("t", without)], AlgorithmSection(), 1.0).routes is None
    with pytest.raises(ValueError, match="1 of 2 samples have no expert routes"):
        train_batch([Group("t", with_routes + without)], AlgorithmSection(), 1.0)


def test_an_engine_without_routes_is_refused_at_the_start():
    def script(prompt, params):
        return []

    with ScriptedEngine(script, experts=(3, 2, 24)) as able, ScriptedEngine(script) as unable:
        services._check_routes([able.url])
        with pytest.raises(UserError, match="--enable-return-routed-experts"):
            services._check_routes([able.url, unable.url])
