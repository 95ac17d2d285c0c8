"""Drivers that are killed: `daytona_drivers.py URL COUNT SEED`.

Each is forked from this process, which has loaded the SDK, makes and uses sandboxes without end, and gets
SIGKILL at a random moment.
"""

import asyncio
import os
import random
import signal
import sys
import time

import daytona  # noqa: F401 # once, for all of them

from titogym.envs.sandboxes.base import SandboxSpec
from titogym.envs.sandboxes.daytona.backend import DaytonaBackend

AT_ONCE = 2


async def drive(url: str, told: int) -> None:
    """Writes a byte to `told` whenever it has got a sandbox or got rid of one."""
    backend = DaytonaBackend("key", url, "us", labels={"run": "killed"})

    async def work() -> None:
        while True:
            sandbox = await backend.create(SandboxSpec(workdir="/app"))
            os.write(told, b".")
            await sandbox.exec("echo x > y")
            await sandbox.destroy()
            os.write(told, b".")

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())


def main(url: str, count: int, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(count):
        tells, told = os.pipe()
        driver = os.fork()
        if driver == 0:
            try:
                asyncio.run(drive(url, told))
            finally:
                os._exit(1)
        os.close(told)
        started = time.monotonic()
        for _ in range(chance.randrange(AT_ONCE + 2)):  # however slow the machine is
            os.read(tells, 1)
        time.sleep(chance.uniform(0, max(0.2, time.monotonic() - started)))
        os.kill(driver, signal.SIGKILL)
        os.waitpid(driver, 0)
        os.close(tells)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
