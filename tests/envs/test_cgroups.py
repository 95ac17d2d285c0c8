import os
import subprocess
from pathlib import Path

import pytest

from titogym.envs.sandboxes import cgroups
from titogym.envs.task import Limits

LIMITS = Limits(memory_mb=100, processes=7, cpus=0.5)


def test_a_real_group_limits_and_goes():
    hierarchies = cgroups.detect()
    if not hierarchies:
        pytest.skip("this process may not make control groups here")
    name = f"test-{os.getpid()}"
    group = cgroups.create(hierarchies, name, LIMITS)
    assert group is not None
    try:
        assert name in cgroups.leftovers(hierarchies)
        child = subprocess.Popen(["sh", "-c", "read line; sleep 60 & sleep 60"], stdin=subprocess.PIPE)
        group.add(child.pid)
        assert child.stdin is not None
        child.stdin.write(b"go\n")
        child.stdin.close()
        for directory in group.directories.values():
            assert str(child.pid) in (directory / "cgroup.procs").read_text().split()
        assert group.oom_kills() == 0
    finally:
        assert cgroups.destroy(cgroups.directories(hierarchies, name)), (
            "the group's processes were to be killed first"
        )
    assert child.wait(5) == -9
    assert name not in cgroups.leftovers(hierarchies)
    assert cgroups.destroy(cgroups.directories(hierarchies, name)), "destroying twice is no error"


def test_what_is_written_for_each_version():
    def files(version):
        return [pair for name in cgroups.CONTROLLERS for pair in cgroups._limit_files(version, name, LIMITS)]

    assert files(1) == [
        ("memory.limit_in_bytes", "104857600"),
        ("memory.memsw.limit_in_bytes", "104857600"),
        ("pids.max", "7"),
        ("cpu.cfs_quota_us", "50000"),
        ("cpu.cfs_period_us", "100000"),
    ]
    assert files(2) == [
        ("memory.max", "104857600"),
        ("memory.swap.max", "0"),
        ("pids.max", "7"),
        ("cpu.max", "50000 100000"),
    ]


def test_a_place_that_cannot_be_written_gives_nothing(tmp_path):
    if os.geteuid() == 0:
        place = Path("/proc/sys/titogym")  # where not even root makes directories
    else:
        place = tmp_path / "closed" / "titogym"
        place.parent.mkdir(mode=0o500)
    assert cgroups._probe(1, place, ("memory",)) == ()
    assert cgroups._probe(2, place, ("memory",)) == ()


def test_a_directory_that_is_no_control_group_gives_nothing(tmp_path):
    assert cgroups._probe(1, tmp_path / "titogym", ("memory", "pids")) == ()
    assert cgroups._probe(2, tmp_path / "titogym", ("memory", "pids")) == ()


@pytest.mark.parametrize(("version", "name"), [(1, "memory.oom_control"), (2, "memory.events")])
def test_counting_kills(tmp_path, version, name):
    group = cgroups.Cgroup({"memory": tmp_path}, version)
    assert group.oom_kills() == 0
    (tmp_path / name).write_text("oom_kill_disable 0\nunder_oom 0\noom 9\noom_kill 3\noom_group_kill 1\n")
    assert group.oom_kills() == 3
