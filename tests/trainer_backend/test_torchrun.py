"""Ranks that torchrun starts: the driver's own on one node, the user's on two (both are this machine)."""

import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing import AuthenticationError
from pathlib import Path

import psutil
import pytest

from tests.trainer_backend.ends import assert_gone
from tests.trainer_backend.models import TINY, batch
from titogym import processes
from titogym.errors import UserError
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.backends.joining import join
from titogym.trainer.backends.layout import Layout
from titogym.trainer.backends.meeting import Hello, connect, parse_address
from titogym.trainer.backends.process import TrainerError, TrainerGone, TrainerProcess
from titogym.trainer.backends.spawn import WORKER
from titogym.trainer.cluster import cluster
from titogym.trainer.config.file import parse_config
from titogym.trainer.config.sections import OptimizerConfig, RunConfig

pytestmark = pytest.mark.train
TWO = BackendSpec(optimizer=OptimizerConfig(lr=1e-2), threads=1, layout=Layout(data=2), timeout=60)
DATA = [30, 50, 41, 7]


def config(directory: Path, **trainer: object) -> RunConfig:
    tables = {"run": {"dir": str(directory), "steps": 1}, "model": {"dir": "m"}}
    return parse_config(
        {
            **tables,
            "environment": {"source": "shell"},
            "cluster": {"max_restarts": 1},
            "trainer": {"data_parallel": 2, "launcher": "torchrun"} | trainer,
        }
    )


def two_nodes(directory: Path, **trainer: object) -> RunConfig:
    address = f"127.0.0.1:{processes.free_port()}"
    return config(directory, nodes=2, driver_address=address, **trainer)


def ranks() -> dict[int, psutil.Process]:
    """Those that torchrun has started below this process."""
    found = [one for one in psutil.Process().children(recursive=True) if WORKER in one.cmdline()]
    return {int(one.environ()["RANK"]): one for one in found if "TORCHELASTIC_RUN_ID" in one.environ()}


def losses(trainer: TrainerProcess, *seeds: int) -> list[float]:
    return [trainer.train_step(batch(DATA, seed))["loss/policy"] for seed in seeds]


def kill_while_it_trains(trainer: TrainerProcess, victim: psutil.Process) -> None:
    threading.Timer(0.5, victim.kill).start()
    with pytest.raises(TrainerGone, match=rf"rank 1 \(process {victim.pid} on "):
        losses(trainer, *range(10_000))
    with pytest.raises(TrainerGone):
        trainer.step()


def test_one_node_trains_as_spawned_ranks_do_until_a_rank_is_killed(tmp_path):
    run = cluster(config(tmp_path))
    joined = run.trainer(TWO, tmp_path / "joined.log", print)
    spawned = TrainerProcess(TWO, tmp_path / "spawned.log")
    try:
        for trainer in (joined, spawned):
            trainer.init_random(TINY, 0)
        assert (tmp_path / "trainer.key").stat().st_mode & 0o777 == 0o600
        assert losses(joined, 0, 1, 2) == losses(spawned, 0, 1, 2)
        with pytest.raises(UserError, match=r"has no config\.json"):
            joined.load_hf(tmp_path)
        assert joined.alive()
        there = ranks()
        assert there.keys() == {0, 1}
        torchrun = there[0].parents()[0]
        kill_while_it_trains(joined, there[1])
        assert not joined.alive()
        assert_gone(*there.values(), torchrun)
    finally:
        joined.close()
        spawned.close()
        run.close()
    assert not (tmp_path / "trainer.key").exists()


def test_ranks_on_two_nodes_come_again_after_one_was_killed(tmp_path):
    settings = two_nodes(tmp_path)
    run = cluster(settings)
    notes: list[str] = []
    trainer = run.trainer(TWO, tmp_path / "trainer.log", notes.append)
    address = parse_address(settings.trainer.driver_address or "")
    torchruns, silent = [], [strangers_come(address)]
    try:
        for number, command in enumerate(notes[0].splitlines()[1:]):
            log = tmp_path / f"node-{number}.log"
            torchruns.append(processes.spawn(f"node {number}", ["bash", "-c", command], log=log))
        assert len(torchruns) == 2
        trainer.init_random(TINY, 0)
        losses(trainer, 0)
        trainer.save(tmp_path / "checkpoint")
        silent.append(strangers_come(address))
        (expected,) = losses(trainer, 1)
        first = ranks()
        kill_while_it_trains(trainer, first[1])
        trainer.close()
        assert_gone(*first.values())

        trainer = run.trainer(TWO, tmp_path / "trainer.log", notes.append)
        trainer.init_random(TINY, 1)
        trainer.load(tmp_path / "checkpoint")
        assert trainer.step() == 1
        assert losses(trainer, 1) == [expected]
        second = ranks()
        trainer.close()
        assert_gone(*second.values())
        assert [one.process.wait(60) for one in torchruns] == [0, 0]
    finally:
        trainer.close()
        run.close()
        for one in torchruns:
            one.stop()
        for connection in silent:
            connection.close()


def strangers_come(address: tuple[str, int]) -> socket.socket:
    """One with another key, one who talks of something else, one who hangs up and one who says nothing."""
    with pytest.raises(AuthenticationError):
        connect(address, b"another", Hello("life", 0, 2, "here", 1))
    with socket.create_connection(address) as other:
        other.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert len(other.recv(64)) > 0
    return socket.create_connection(address)


DRIVER = """
import sys
from pathlib import Path
from titogym.trainer.backends.base import BackendSpec
from titogym.trainer.cluster import cluster
from titogym.trainer.config.sections import RunConfig
run = cluster(RunConfig.model_validate_json(sys.argv[1]))
trainer = run.trainer(BackendSpec(), Path(sys.argv[2]), print)
assert "torch" not in sys.modules
print(trainer.step(), trainer.pid, flush=True)
sys.stdin.read()
"""


def test_ranks_and_their_torchrun_die_with_the_driver(tmp_path):
    settings = config(tmp_path, data_parallel=1).model_dump_json(exclude_unset=True)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, settings, str(tmp_path / "trainer.log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    step, pid = driver.stdout.readline().split()
    assert step == "0"
    rank = psutil.Process(int(pid))
    torchrun = rank.parents()[0]
    assert "torch.distributed.run" in torchrun.cmdline()
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert_gone(rank, torchrun)


def test_ranks_that_do_not_come_are_named(tmp_path):
    settings = two_nodes(tmp_path, start_timeout=1.0)
    run = cluster(settings)
    try:
        trainer = run.trainer(TWO, tmp_path / "trainer.log", print)
        address = parse_address(settings.trainer.driver_address or "")
        key = (tmp_path / "trainer.key").read_bytes()
        here = connect(address, key, Hello("life", 0, 2, "here", os.getpid()))
        with pytest.raises(
            TrainerError, match=r"Rank 1 of the trainer has not come to 127\.0\.0\.1:\d+ in 1 s"
        ):
            trainer.init_random(TINY, 0)
        trainer.close()
        assert here.recv() == "farewell"
        trainer = run.trainer(TWO, tmp_path / "trainer.log", print)
        connect(address, key, Hello("life", 0, 3, "here", os.getpid()))
        with pytest.raises(TrainerError, match="torchrun on here starts 3 ranks, and the layout DP2 has 2"):
            trainer.init_random(TINY, 0)
        trainer.close()
    finally:
        run.close()


def test_a_rank_that_is_not_let_in_says_why(tmp_path, monkeypatch):
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    settings = two_nodes(tmp_path)
    address = settings.trainer.driver_address or ""
    alone = subprocess.run(
        [sys.executable, "-m", WORKER, "join", address, str(tmp_path / "key"), "0"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 1
    assert alone.stderr.startswith(f"No driver has answered at {address} in 0 s (")
    assert alone.stderr.count("\n") == 1

    run = cluster(settings)
    try:
        (tmp_path / "key").write_text("another")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            UserError, match=rf"driver at {address} refuses the key in .*, which is of another"
        ):
            join(parse_address(address), tmp_path / "key", 30.0)
    finally:
        run.close()


def test_an_address_where_the_driver_cannot_listen_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"Cannot listen at trainer.driver_address = '127.0.0.1:{port}'"):
            cluster(config(tmp_path, driver_address=f"127.0.0.1:{port}"))


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"launcher": "spawn", "nodes": 2}, "trainer.nodes has no effect here"),
        ({"launcher": "spawn", "driver_address": "a:1"}, "trainer.driver_address has no effect here"),
        ({"nodes": 2}, "needs trainer.driver_address"),
        ({"nodes": 3, "driver_address": "a:1"}, "cannot share 2 ranks equally"),
        ({"driver_address": "10.0.0.5"}, "is not HOST:PORT"),
        ({"driver_address": "http://a:1"}, "is not HOST:PORT"),
        ({"driver_address": "a:99999"}, "trainer.driver_address"),
        ({"driver_address": "0.0.0.0:29400"}, "name an address that they can reach"),
    ],
)
def test_what_cannot_be_launched_is_refused(tmp_path, trainer, message):
    with pytest.raises(UserError, match=message):
        config(tmp_path, **trainer)


def test_ray_and_torchrun_are_refused_together(tmp_path):
    given = config(tmp_path).model_dump(mode="json", exclude_unset=True)
    with pytest.raises(UserError, match="Ray starts the trainer itself"):
        parse_config(given | {"cluster": {"kind": "ray"}})
