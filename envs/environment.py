"""What an environment is: how a task's world is laid out, and how the agent's work is graded."""

from typing import Protocol

from titogym.envs.sandboxes.base import Sandbox
from titogym.envs.task import Grade, Task


class Environment(Protocol):
    """One kind of task. Registered by name, entry point or dotted path (see `registry`)."""

    name: str

    async def setup(self, task: Task, sandbox: Sandbox) -> None:
        """Lay the task's files into a fresh sandbox. Raises `SandboxError` when it cannot."""
        ...

    async def grade(self, task: Task, sandbox: Sandbox) -> Grade:
        """Judge what the agent left. Its processes are dead, and it never runs again.

        The sandbox may be used up by this. Raises `GradingError` where there is no valid reward.
        """
        ...
