"""mini-swe-agent (https://mini-swe-agent.com), unmodified, from PyPI.

The whole program runs inside the sandbox, so its shell commands do too. It lives in an environment of
its own, which the sandbox sees read-only together with the interpreter that it was made from.
"""

import asyncio
import json
import logging
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from titogym import venvs
from titogym.envs.sandboxes.base import Mount, Sandbox, SandboxError
from titogym.envs.task import Task
from titogym.harnesses.base import Connection, HarnessResult, Outcome
from titogym.harnesses.program import LOG_DIRECTORY, read_tail, run_program

log = logging.getLogger(__name__)

VERSION = "2.4.6"
TRAJECTORY = f"{LOG_DIRECTORY}/mini-swe-agent.traj.json"
TRAJECTORY_BYTES = 16 << 20

# How the program names its own ending -> ours. Names of exceptions stand for crashes.
ENDINGS: dict[str, tuple[Outcome, str]] = {
    "Submitted": ("finished", ""),
    "RepeatedFormatError": ("finished", "The agent gave up after too many malformed answers."),
    "LimitsExceeded": ("turn_limit", "The agent reached its limit of turns."),
    "TimeExceeded": ("timeout", "The agent reached its own limit of time."),
}


@dataclass
class MiniSweAgent:
    """Runs `mini` without confirmation.

    config: the program's configuration file: `mini.yaml` calls tools, `mini_textbased.yaml` writes its
      commands as text.
    overrides: further `key=value` settings of the program, such as `model.model_kwargs.temperature=1`.
    """

    config: str = "mini.yaml"
    overrides: tuple[str, ...] = ()

    name = "mini_swe_agent"
    matcher = "strict"
    inside = True

    def __post_init__(self) -> None:
        self._python: Path | None = None
        self._mounts: tuple[Mount, ...] = ()

    async def prepare(self) -> None:
        if self._python is None:
            install = [[f"mini-swe-agent=={VERSION}"]]
            self._python = await asyncio.to_thread(venvs.ensure, "mini-swe-agent", install, report=log.info)
            self._mounts = tuple(
                Mount(path, str(path)) for path in await asyncio.to_thread(_needed, self._python)
            )

    def mounts(self) -> tuple[Mount, ...]:
        return self._mounts

    async def run(self, task: Task, sandbox: Sandbox, connection: Connection) -> HarnessResult:
        result = await run_program(
            self._arguments(task, connection),
            name=self.name,
            task=task,
            sandbox=sandbox,
            connection=connection,
            env={
                "MSWEA_CONFIGURED": "true",
                "MSWEA_SILENT_STARTUP": "1",
                "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/mini-swe-agent",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # there is no network to fetch prices from
            },
        )
        try:
            trajectory = await read_tail(sandbox, TRAJECTORY, TRAJECTORY_BYTES)
        except SandboxError:
            return result
        return _read_ending(result, trajectory)

    async def close(self) -> None:
        pass

    def _arguments(self, task: Task, connection: Connection) -> list[str]:
        model = {"api_base": connection.base_url, "api_key": connection.api_key}
        settings = {
            "agent.step_limit": str(task.limits.turns),
            "agent.cost_limit": "0",
            "model.model_kwargs": json.dumps(model),
        }
        specs = [self.config, *(f"{key}={value}" for key, value in settings.items()), *self.overrides]
        return [
            str(self._python),
            "-m",
            "minisweagent.run.mini",
            "--yolo",
            "--exit-immediately",
            f"--model=openai/{connection.model}",
            f"--task={task.instruction}",
            f"--output={TRAJECTORY}",
            *(f"--config={spec}" for spec in specs),
        ]


def _needed(python: Path) -> set[Path]:
    """The directories without which this interpreter does not run; `/usr` every sandbox has."""
    script = "import sys; print(sys.prefix); print(sys.base_prefix)"
    found = subprocess.run([str(python), "-c", script], check=True, capture_output=True, text=True).stdout
    return {path for path in map(Path, found.split()) if not path.is_relative_to("/usr")}


def _read_ending(result: HarnessResult, trajectory: str) -> HarnessResult:
    """`result` as the program's own trajectory file tells it, where it says more."""
    try:
        status = json.loads(trajectory)["info"]["exit_status"]
    except (ValueError, TypeError, KeyError):
        return result
    result = replace(result, log=trajectory, metadata={"exit_status": status})
    if result.outcome == "finished" and status in ENDINGS:
        outcome, detail = ENDINGS[status]
        return replace(result, outcome=outcome, detail=detail)
    return result
