"""Agents that cheat in a container. Each scores 0, is an error, or is flagged in the evidence."""

from dataclasses import replace

import pytest

from tests.envs.engine import SYSTEM, load_images, private_engine
from tests.envs.test_cheating import CHEATS, FLAGGED, TASK, attempt
from titogym.envs.sandboxes.base import SandboxError
from titogym.envs.sandboxes.docker.backend import DockerBackend
from titogym.envs.task import GradingError

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker")]

# The test runs a program of the agent's, as root of the container that the tests run in.
PROGRAM_TASK = replace(
    TASK,
    tests={
        "test.sh": '#!/bin/bash\n[ "$(/app/program)" = 42 ] && reward=1 || reward=0\nsleep 0.05\n'
        "echo $reward > /logs/verifier/reward.txt\nsleep 0.05\n"
    },
)
SAME_AS_LOCAL = (
    "writes the reward",
    "links /logs to its own files",
    "leaves a daemon that rewrites the reward",
    "writes the tests",
    "its program writes the reward",
    "its program leaves a daemon that rewrites the reward",
    "its program kills the tests",
    "its program changes the tests",
)
# Here the programs of the image are the agent's to replace: then the remarks say so.
FLAGGED_HERE = {
    "/usr/bin/cat": "printf '#!/bin/bash\\necho 42\\n' > /usr/bin/cat",
    "/usr/local/bin/head": "mkdir -p /usr/local/bin; printf x > /usr/local/bin/head",
    "/usr/lib/sitecustomize.py": "printf 'import os' > /usr/lib/sitecustomize.py",
    "/etc/ld.so.preload": "printf '' > /etc/ld.so.preload",
}


@pytest.fixture(scope="module")
def engine():
    with private_engine() as address:
        load_images(address)
        yield address


@pytest.fixture
async def backend(engine):
    made = DockerBackend(engine, SYSTEM, labels={"run": "tests"})
    yield made
    await made.close()


async def test_honest_work_scores_1(backend):
    grade = await attempt(backend, TASK, "echo 42 > answer.txt")
    assert grade.reward == 1
    assert grade.evidence["remarks"] == []
    assert grade.evidence["touched"] == []
    assert (await attempt(backend, PROGRAM_TASK, "@echo 42")).reward == 1


@pytest.mark.parametrize("cheat", SAME_AS_LOCAL)
async def test_cheating_does_not_pay(backend, cheat):
    task, command = CHEATS[cheat]
    try:
        grade = await attempt(backend, TASK if task is TASK else PROGRAM_TASK, command)
    except (GradingError, SandboxError):
        return
    assert grade.reward == 0, grade


async def test_changes_of_the_system_are_remarked(backend):
    grade = await attempt(backend, TASK, "; ".join(FLAGGED_HERE.values()))
    remarks = "\n".join(grade.evidence["remarks"])
    assert all(path in remarks for path in FLAGGED_HERE), remarks


async def test_what_tests_may_run_unasked_is_flagged(backend):
    done = [cheat for name, cheat in FLAGGED.items() if name != "links the tests"]
    task = replace(TASK, files={**TASK.files, "given/conftest.py": "x = 1\n", "gone/conftest.py": ""})
    grade = await attempt(backend, task, "; ".join(f"({command})" for command, _ in done))
    missed = {path for _, path in done} - set(grade.evidence["touched"])
    assert not {path for path in missed if "site-packages" not in path}  # where the image has no such Python
