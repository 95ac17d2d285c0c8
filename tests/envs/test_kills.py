"""SIGKILL of the driver at any moment leaves nothing on the engine once the reaper has passed."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.envs.engine import BUSYBOX, load_images, private_engine
from titogym.envs.sandboxes.docker.backend import DockerBackend

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker")]

DRIVER = """
import asyncio, random, sys
from titogym.envs.sandboxes.base import SandboxSpec
from titogym.envs.sandboxes.docker.backend import DockerBackend

async def work(backend):
    while True:
        sandbox = await backend.create(SandboxSpec())
        await sandbox.exec("sleep 300", timeout=random.random() / 4)
        snapshot = await sandbox.snapshot()
        sandbox = await sandbox.successor(read_only={"/tests": {"test.sh": "true"}}, env={})
        await sandbox.exec("sleep 0.02")
        await asyncio.gather(backend.delete_snapshot(snapshot), sandbox.destroy())

async def main():
    backend = DockerBackend(sys.argv[1], image=sys.argv[2])
    await backend.reap()
    print("started", flush=True)
    await asyncio.gather(*(work(backend) for _ in range(3)))

asyncio.run(main())
"""
ROUNDS = int(os.environ.get("TITOGYM_TEST_DOCKER_KILLS", "4"))


def test_sigkill_at_random_moments():
    asyncio.run(kill_drivers(ROUNDS))


async def kill_drivers(rounds):
    chance, seen = random.Random(7), 0
    with private_engine() as address:
        load_images(address)
        backend = DockerBackend(address, image=BUSYBOX)
        await backend.reap()
        for number in range(1, rounds + 1):
            await asyncio.to_thread(run_and_kill, address, chance.random() * 4)
            reaped = await backend.reap()
            seen += len(reaped.destroyed)
            assert reaped.failed == {}, reaped.failed
            left_over = everything(backend.engine.api)
            assert left_over == [], f"{left_over} after {reaped}"
            if number % 20 == 0:
                print(f"{number} kills left {seen} sandboxes, all of which the reaper destroyed", flush=True)
        await backend.close()
    assert seen > 0, "no sandbox was alive at any of the moments"


def run_and_kill(address, seconds):
    command = [sys.executable, "-c", DRIVER, address, BUSYBOX]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        driver.stdout.readline()
        time.sleep(seconds)
        driver.send_signal(signal.SIGKILL)


def everything(api):
    """Containers, volumes and images but those of the tests."""
    images = [name for found in api.images() for name in found["RepoTags"] or ["nameless"]]
    return [
        *(f"{found['Id']} {found['State']} {found['Labels']}" for found in api.containers(all=True)),
        *(found["Name"] for found in api.volumes()["Volumes"] or ()),
        *(name for name in images if not name.startswith("titogym-test/")),
    ]


if __name__ == "__main__":  # python -m tests.envs.test_kills 200
    asyncio.run(kill_drivers(int(sys.argv[1])))
