"""SIGKILL of the driver at any moment leaves nothing once the reaper has passed."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titogym.envs.sandboxes import cgroups, owners, reaper
from titogym.envs.sandboxes.base import SandboxError, SandboxSpec
from titogym.envs.sandboxes.local import LocalBackend
from titogym.envs.sandboxes.machine import Machine

pytestmark = pytest.mark.sandbox

DRIVER = """
import asyncio, random, sys
from pathlib import Path
from titogym.envs.sandboxes.base import SandboxError, SandboxSpec
from titogym.envs.sandboxes.local import LocalBackend

async def work(backend):
    while True:
        sandbox = await backend.create(SandboxSpec())
        await sandbox.exec("setsid sleep 300 & mkdir -p deep/deeper && echo hi > deep/file")
        await sandbox.exec("sleep 300", timeout=random.random() / 4)
        sandbox = await sandbox.successor(read_only={"/tests": {"test.sh": "true"}}, env={})
        await sandbox.exec("sleep 0.02")
        await sandbox.destroy()

async def main():
    backend = LocalBackend(Path(sys.argv[1]))
    print("started", flush=True)
    await asyncio.gather(*(work(backend) for _ in range(4)))

asyncio.run(main())
"""
ROUNDS = int(os.environ.get("TITOGYM_TEST_KILLS", "8"))


@pytest.fixture(scope="module")
def hierarchies() -> tuple[cgroups.Hierarchy, ...]:
    return cgroups.detect()


def test_sigkill_at_random_moments(sandboxes, hierarchies):
    chance = random.Random(5)
    seen = 0
    for _ in range(ROUNDS):
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, sandboxes], stdout=subprocess.PIPE)
        assert driver.stdout is not None
        driver.stdout.readline()
        time.sleep(chance.random())
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        driver.stdout.close()
        seen += len(reaper.leftovers(sandboxes, hierarchies))
        done = reaper.reap(sandboxes, hierarchies)
        assert done.failed == {}
        assert os.listdir(sandboxes) == []
        assert not [name for name in cgroups.leftovers(hierarchies) if f"-{driver.pid}-" in name]
        assert processes_of(driver.pid) == []
    assert seen > 0, "no sandbox was alive at any of the moments"


async def test_a_backend_reaps_when_it_starts_and_spares_the_living(backend, sandboxes):
    mine = await backend.create(SandboxSpec())
    try:
        me = owners.me()
        dead = f"{me.namespace}-{me.pid}-{me.started - 1}-0123456789ab"
        (sandboxes / dead / "root" / "tmp").mkdir(parents=True)
        (sandboxes / "a note of somebody").touch()
        other = await LocalBackend(sandboxes).create(SandboxSpec())
        await other.destroy()
        assert sorted(os.listdir(sandboxes)) == sorted([mine.id, "a note of somebody"])
        assert (await mine.exec("echo alive")).stdout == "alive\n"
        (sandboxes / "a note of somebody").unlink()
    finally:
        await mine.destroy()


def test_groups_that_an_owner_made_elsewhere(sandboxes, hierarchies):
    """A driver in another control group than the reaper's keeps its sandboxes' groups below its own."""
    if not hierarchies:
        pytest.skip("this process may not make control groups here")
    me = owners.me()
    dead = f"{me.namespace}-{me.pid}-{me.started - 1}-0123456789ab"
    elsewhere = hierarchies[0].parent.with_name("titogym-test-elsewhere")
    (elsewhere / dead).mkdir(parents=True)
    try:
        (sandboxes / dead).mkdir()
        reaper.write_record(sandboxes / dead, {}, [elsewhere / dead], 3600)
        assert reaper.reap(sandboxes, hierarchies).destroyed == [dead]
        assert not (elsewhere / dead).exists()
    finally:
        for group in (elsewhere / dead, elsewhere):
            if group.exists():
                group.rmdir()


async def test_trees_made_to_resist_are_deleted(backend, sandboxes):
    sandbox = await backend.create(SandboxSpec())
    await sandbox.exec(
        "mkdir -p shut/in && chmod 000 shut/in shut; mkfifo pipe; ln -s / out; ln -s nowhere broken\n"
        'python3 -c \'import os\nfor _ in range(1050): os.mkdir("d"); os.chdir("d")\''
    )
    await sandbox.destroy()
    assert os.listdir(sandboxes) == []


async def test_labels_and_owner_are_on_disk_before_anything_runs(backend, sandboxes, monkeypatch):
    seen = {}
    start = Machine.start

    async def started(*arguments, **options):
        for name in os.listdir(sandboxes):
            seen[name] = (sandboxes / name / "record.json").read_text()
        return await start(*arguments, **options)

    monkeypatch.setattr(Machine, "start", started)
    sandbox = await backend.create(SandboxSpec(labels={"episode": "e-1"}))
    await sandbox.destroy()
    assert list(seen) == [sandbox.id]
    assert '"run": "tests"' in seen[sandbox.id]
    assert '"episode": "e-1"' in seen[sandbox.id]
    owner = owners.owner_of(sandbox.id)
    assert owner is not None
    assert owner.pid == os.getpid()


def processes_of(driver: int) -> list[str]:
    """Command lines that bear the id of a sandbox of this driver."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if f"-{driver}-" in line and "bwrap" in line:
                found.append(line)
    return found


async def test_a_sandbox_whose_owner_is_out_of_sight_is_spared_until_it_expires(backend, sandboxes):
    me = owners.me()
    for name, lifetime in (("0123456789ab", 60.0), ("0123456789ac", -1.0)):
        directory = sandboxes / f"{me.namespace + 1}-{me.pid}-{me.started}-{name}"
        directory.mkdir()
        reaper.write_record(directory, {}, [], lifetime)
    done = await backend.reap()
    assert [name.rpartition("-")[2] for name in done.destroyed] == ["0123456789ac"]
    for directory in sandboxes.iterdir():
        shutil.rmtree(directory)


async def test_a_destruction_that_fails_is_tried_again_and_told(backend, sandboxes, monkeypatch):
    sandbox = await backend.create(SandboxSpec())
    remove, tries = reaper.remove, []

    def failing(root, hierarchies, name):
        tries.append(name)
        raise SandboxError("the disk is on fire")

    monkeypatch.setattr(reaper, "remove", failing)
    backend.destruction._pauses = (0.01, 0.01)
    with pytest.raises(SandboxError, match="could not be destroyed: the disk is on fire"):
        await sandbox.destroy()
    assert tries == [sandbox.id] * 3
    assert backend.undestroyed == {sandbox.id: "SandboxError: the disk is on fire"}
    monkeypatch.setattr(reaper, "remove", remove)
    await backend.close()
    assert backend.undestroyed == {}
