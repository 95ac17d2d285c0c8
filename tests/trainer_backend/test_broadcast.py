"""Weight broadcast to doubles of the engine's update side: arrival, buckets, and every failure in time.

The same against real SGLang: `test_weight_update`.
"""

import subprocess
import sys
import time
from typing import Literal

import httpx
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tests.trainer_backend.update_double import digest
from titogym.trainer.weights.broadcast import WeightBroadcast, WeightUpdateError, buckets
from titogym.trainer.weights.settings import BroadcastSettings

pytestmark = pytest.mark.train


@pytest.fixture(scope="module", autouse=True)
def default_group():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def start_doubles(count):
    begun = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainer_backend.update_double"], stdout=subprocess.PIPE, text=True
        )
        for _ in range(count)
    ]
    urls = []
    for process in begun:
        assert process.stdout is not None
        urls.append(f"http://127.0.0.1:{int(process.stdout.readline())}")
    return begun, urls


@pytest.fixture(scope="module")
def pair():
    begun, urls = start_doubles(2)
    yield urls
    for process in begun:
        process.kill()
        process.wait()


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (100, 7), "b": (3,), "c": (64, 64), "d": (5, 5)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    made["e"] = torch.randn(31, generator=generator).to(torch.bfloat16)
    return made


def test_buckets_keep_order_and_bound():
    made = tensors()
    cut = list(buckets(made.items(), 3000))
    assert [bucket.names for bucket in cut] == [["a", "b"], ["c"], ["d", "e"]]  # c alone is above the bound
    assert cut[2].dtypes == ["float32", "bfloat16"]
    assert cut[2].flat.nbytes == 5 * 5 * 4 + 31 * 2
    assert cut[1].flat.view(torch.float32).view(64, 64).equal(made["c"])


def test_two_engines_get_every_tensor_again_and_again(pair):
    weights = WeightBroadcast(pair, BroadcastSettings(bucket_bytes=3000, timeout=30))
    weights.connect()
    for version in ("0", "1"):
        made = tensors(int(version))
        figures = weights.publish(made.items(), version)
        assert figures["publish/bytes"] == sum(tensor.nbytes for tensor in made.values())
        for url in pair:
            assert httpx.get(f"{url}/received").json() == {name: digest(t) for name, t in made.items()}
            state = httpx.get(f"{url}/state").json()
            assert state["version"] == version
            assert state["paused"] is False
    weights.close()
    assert httpx.get(f"{pair[0]}/state").json()["log"][-1] == "/destroy_weights_update_group"


MODES: list[tuple[Literal["retract", "in_place", "abort"], bool]] = [
    ("retract", True),
    ("in_place", False),
    ("abort", True),
]


@pytest.mark.parametrize(("mode", "flushes"), MODES)
def test_old_keys_and_values_go_unless_asked_to_stay(pair, mode, flushes):
    weights = WeightBroadcast(pair[:1], BroadcastSettings(mode=mode, timeout=30))
    weights.connect()
    weights.publish(tensors().items(), "1")
    assert httpx.get(f"{pair[0]}/state").json()["flushed"] is flushes
    weights.close()


def test_an_update_left_open_by_a_dead_trainer_is_closed_first(pair):
    httpx.post(f"{pair[0]}/begin_weight_update", json={})
    weights = WeightBroadcast(pair, BroadcastSettings(timeout=30))
    weights.connect()
    weights.publish(tensors().items(), "7")
    assert httpx.get(f"{pair[0]}/state").json()["version"] == "7"
    weights.close()


@pytest.mark.parametrize("path", ["/init_weights_update_group", "/update_weights_from_distributed"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("refuse", "refused on purpose"),
        ("hang", "within 3 s"),
        ("die", "could not be given new weights|broke"),
    ],
)
def test_a_failing_engine_is_an_error_in_time(pair, path, kind, message):
    begun, (broken,) = start_doubles(1) if kind == "die" else ([], pair[1:])
    httpx.post(f"{broken}/fault", json={"path": path, "kind": kind})
    weights = WeightBroadcast([pair[0], broken], BroadcastSettings(timeout=3))
    start = time.monotonic()

    def update():
        weights.connect()
        weights.publish(tensors().items(), "1")

    with pytest.raises(WeightUpdateError, match=message):
        update()
    assert time.monotonic() - start < 15
    with pytest.raises(WeightUpdateError, match="connect again"):
        weights.publish(tensors().items(), "2")
    weights.close()
    if not begun:
        httpx.post(f"{broken}/fault", json={})
    for process in begun:
        process.wait(10)


def test_no_engine_at_the_address():
    weights = WeightBroadcast(["http://127.0.0.1:9"], BroadcastSettings(timeout=3))
    with pytest.raises(WeightUpdateError, match=r"127\.0\.0\.1:9"):
        weights.connect()
    weights.close()
