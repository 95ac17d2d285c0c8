"""Every mover against doubles of the update side of engines: arrival, order, and every failure in time.

The same against real SGLang: `test_weight_update`.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tests.trainer_backend.update_double import digest
from titogym.trainer.weights.engines import WeightUpdateError
from titogym.trainer.weights.settings import WeightSettings
from titogym.trainer.weights.update import WeightUpdates

pytestmark = pytest.mark.train
MOVERS = ["broadcast", "handoff", "disk", "p2p"]


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


@pytest.fixture
def connect(tmp_path):
    """Updates of the engines at some URLs by a mover; closed at the end."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    opened = []

    def make(urls, mover, **settings):
        made = WeightUpdates(
            urls,
            WeightSettings(
                mover=mover, directory=tmp_path / "weights", model_dir=tmp_path / "model", **settings
            ),
        )
        opened.append(made)
        return made

    yield make
    for one in opened:
        one.close()
    assert not list((tmp_path / "weights").glob("*")), "files of weights were left behind"
    assert not list(Path("/dev/shm").glob(f"titogym-weights-{os.getpid()}-*"))


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (100, 7), "b": (3,), "c": (64, 64), "d": (5, 5)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    made["e"] = torch.randn(31, generator=generator).to(torch.bfloat16)
    return made


def state(url):
    return httpx.get(f"{url}/state").json()


@pytest.mark.parametrize("mover", MOVERS)
def test_two_engines_get_every_tensor_again_and_again(pair, connect, mover):
    weights = connect(pair, mover, bucket_bytes=3000, timeout=30)
    weights.connect()
    for version in ("0", "1", "2"):
        made = tensors(int(version))
        weights.publish(made.items(), version)
        for url in pair:
            assert httpx.get(f"{url}/received").json() == {name: digest(t) for name, t in made.items()}
            assert state(url)["version"] == version
            assert state(url)["paused"] is False


def test_the_bytes_that_travel_are_counted(pair, connect):
    size = sum(tensor.nbytes for tensor in tensors().values())
    sent = {}
    for mover in MOVERS:
        weights = connect(pair, mover, timeout=30)
        weights.connect()
        weights.publish(tensors().items(), "0")
        made = tensors()
        made["c"][3, 3] += 1  # one element in 4,855
        sent[mover] = weights.publish(made.items(), "1")
    assert sent["broadcast"]["publish/bytes"] == size
    assert sent["handoff"]["publish/bytes"] == 0
    assert 2 * size < sent["p2p"]["publish/bytes"] < 2 * size + 2000  # to each engine, with a header
    assert sent["disk"]["publish/bytes"] < 100
    assert 0 < sent["disk"]["publish/changed_fraction"] < 4.5 / size


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize(("mode", "flushes"), [("retract", True), ("in_place", False), ("abort", True)])
def test_old_keys_and_values_go_unless_asked_to_stay(pair, connect, mover, mode, flushes):
    weights = connect(pair[:1], mover, mode=mode, timeout=30)
    weights.connect()
    weights.publish(tensors().items(), "1")
    assert state(pair[0])["flushed"] is flushes


@pytest.mark.parametrize("mover", ["disk", "p2p"])
def test_engines_generate_until_the_weights_are_beside_them(pair, connect, mover):
    weights = connect(pair[:1], mover, timeout=30)
    weights.connect()
    before = len(state(pair[0])["log"])
    weights.publish(tensors().items(), "1")
    calls = [name.partition("?")[0] for name in state(pair[0])["log"][before:]]
    assert calls[:2] == ["/pause_generation", "/update_weights_from_disk"]


@pytest.mark.parametrize("mover", ["broadcast", "handoff"])
def test_an_update_left_open_by_a_dead_trainer_is_closed_first(pair, connect, mover):
    httpx.post(f"{pair[0]}/begin_weight_update", json={})
    weights = connect(pair, mover, timeout=30)
    weights.connect()
    weights.publish(tensors().items(), "7")
    assert state(pair[0])["version"] == "7"


FAILURES = [
    ("refuse", "refused on purpose"),
    ("hang", "within 3 s"),
    ("die", "could not be given new weights|broke"),
]


@pytest.mark.parametrize(("kind", "message"), FAILURES)
@pytest.mark.parametrize(
    ("mover", "path"),
    [
        ("broadcast", "/init_weights_update_group"),
        ("broadcast", "/update_weights_from_distributed"),
        ("handoff", "/update_weights_from_tensor"),
        ("disk", "/update_weights_from_disk"),
        ("p2p", "/update_weights_from_disk"),
    ],
)
def test_a_failing_engine_is_an_error_in_time(pair, connect, mover, path, kind, message):
    with doubles_if(kind == "die", pair[1:]) as (broken,):
        httpx.post(f"{broken}/fault", json={"path": path, "kind": kind})
        weights = connect([pair[0], broken], mover, timeout=3 if kind == "hang" else 30)
        start = time.monotonic()

        def update():
            weights.connect()
            weights.publish(tensors().items(), "1")

        with pytest.raises(WeightUpdateError, match=message):
            update()
        assert time.monotonic() - start < 25
        if mover == "broadcast":  # the ranks of the group may be out of step
            with pytest.raises(WeightUpdateError, match="connect again"):
                weights.publish(tensors().items(), "2")


def test_an_engine_that_something_else_has_updated_is_named(pair, connect):
    """What it sampled since then is of weights that this run does not know."""
    ours, theirs = connect(pair, "disk", timeout=30), connect(pair[1:], "handoff", timeout=30)
    for one in (ours, theirs):
        one.connect()
    ours.publish(tensors().items(), "1")
    theirs.publish(tensors(5).items(), "preflight")
    with pytest.raises(WeightUpdateError, match=f"{pair[1]} has weight version 'preflight' in place of '1'"):
        ours.publish(tensors(2).items(), "2")


@contextmanager
def doubles_if(own, shared):
    begun, urls = start_doubles(1) if own else ([], shared)
    yield urls
    for process in begun:
        process.kill()
        process.wait(10)
    for url in shared:
        httpx.post(f"{url}/fault", json={})


@pytest.mark.parametrize("mover", MOVERS)
def test_no_engine_at_the_address(connect, mover):
    weights = connect(["http://127.0.0.1:9"], mover, timeout=3)
    with pytest.raises(WeightUpdateError, match=r"127\.0\.0\.1:9"):
        weights.connect()


@pytest.mark.parametrize("mover", ["handoff", "p2p"])
def test_engines_elsewhere_are_refused_by_movers_that_share_memory(connect, mover):
    weights = connect(["http://192.0.2.1:30000"], mover, timeout=3)
    with pytest.raises(WeightUpdateError, match="on another machine"):
        weights.connect()


def test_a_dead_receiver_is_an_error_that_says_so(pair, connect):
    weights = connect(pair[:1], "p2p", timeout=10)
    weights.connect()
    weights.publish(tensors().items(), "0")
    (receiver,) = [
        child
        for child in psutil.Process().children()
        if "titogym.trainer.weights.receiver" in " ".join(child.cmdline())
    ]
    os.kill(receiver.pid, signal.SIGKILL)
    with pytest.raises(WeightUpdateError, match="receiver of an engine"):
        weights.publish(tensors(1).items(), "1")
    assert state(pair[0])["version"] == "0"
