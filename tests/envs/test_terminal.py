import time
from dataclasses import replace

import pytest

from titogym.envs.sandboxes.base import SandboxError, SandboxSpec
from titogym.envs.task import Task
from titogym.envs.terminal import TerminalEnvironment

pytestmark = pytest.mark.sandbox

CHECK = {
    "command": "echo x >> /app/n; [ $(wc -l < /app/n) -ge 4 ]",
    "interval_sec": 0.01,
    "timeout_sec": 5.0,
    "start_period_sec": 0.0,
    "start_interval_sec": 0.2,
    "retries": 4,
}
TASK = Task("t", "Do.", tests={"test.sh": "true"}, workdir="/app", metadata={"healthcheck": CHECK})


@pytest.fixture
async def set_up(backend):
    made = []

    async def set_up(task):
        made.append(await backend.create(SandboxSpec.for_task(task)))
        await TerminalEnvironment().reset(task, made[-1])

    yield set_up
    for sandbox in made:
        await sandbox.destroy()


async def test_a_health_check_is_repeated_until_it_succeeds(set_up):
    await set_up(TASK)


async def test_a_health_check_that_fails_too_often_says_so(set_up):
    with pytest.raises(SandboxError, match="failed 2 times: status 1"):
        await set_up(replace(TASK, metadata={"healthcheck": {**CHECK, "retries": 2}}))


async def test_failures_while_it_starts_do_not_count(set_up):
    started = time.monotonic()
    await set_up(replace(TASK, metadata={"healthcheck": {**CHECK, "retries": 1, "start_period_sec": 60.0}}))
    assert time.monotonic() - started > 0.6  # three pauses of the start
