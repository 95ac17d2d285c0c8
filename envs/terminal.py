"""The terminal environment: files in a sandbox, graded by a test script that the agent never saw."""

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titogym.envs import dockerfile, rewards
from titogym.envs.sandboxes.base import ExecResult, Sandbox, SandboxError
from titogym.envs.task import Grade, GradingError, Task
from titogym.envs.terminal_bench import recipe_of, resolve_references
from titogym.errors import UserError

SETUP_SECONDS = 600.0
REWARD_JSON = "/logs/verifier/reward.json"
REWARD_TEXT = "/logs/verifier/reward.txt"
_REWARD_BYTES = 1 << 16
_OUTPUT_BYTES = 1 << 18
_EVIDENCE_LINES = 40
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class TerminalEnvironment:
    """Runs Terminal-Bench / Harbor task directories, and tasks that carry their files and tests as texts.

    Grading takes place in a fresh sandbox over the agent's files: no process of the agent is left, system
    programs, `/etc` and `/logs` are new, and the tests appear, unwritable, at `/tests` only there.
    """

    name = "terminal"

    async def setup(self, task: Task, sandbox: Sandbox) -> None:
        if task.directory is not None:
            context = task.directory / "environment"
            for step in recipe_of(task.directory).steps:
                await _carry_out(step, context, sandbox)
        if task.files:
            await sandbox.upload(task.files, task.workdir)

    async def solve(self, task: Task, sandbox: Sandbox) -> ExecResult:
        """Run the task's own solution, as its author meant it to be run. Raises `UserError` without one."""
        if task.solution is None:
            raise UserError(f"Task {task.id} has no solution/solve.sh.")
        await sandbox.upload(task.solution, "/solution")
        return await sandbox.exec(
            [*_interpreter(task.solution, "solve.sh"), "/solution/solve.sh"],
            timeout=task.limits.agent_seconds,
            env=_resolved(task, "solution_env"),
            max_output=_OUTPUT_BYTES,
        )

    async def grade(self, task: Task, sandbox: Sandbox) -> Grade:
        if task.tests is None:
            raise UserError(f"Task {task.id} has no tests.")
        started = time.monotonic()
        env = {**task.env, **_resolved(task, "verifier_env"), "PYTHONNOUSERSITE": "1"}
        env["PATH"] = _trusted_path(env.get("PATH", ""))
        verifier = await sandbox.successor(read_only={"/tests": task.tests}, env=env)
        try:
            done = await verifier.exec(
                [*_interpreter(task.tests, "test.sh"), "/tests/test.sh"],
                timeout=task.limits.verifier_seconds,
                max_output=_OUTPUT_BYTES,
            )
            await verifier.kill_processes()  # whatever the tests started must not touch the reward any more
            texts = {path: await verifier.read(path, _REWARD_BYTES) for path in (REWARD_JSON, REWARD_TEXT)}
        finally:
            await verifier.destroy()
        lines = (done.stdout + done.stderr).strip().splitlines()
        evidence: dict[str, Any] = {
            "exit_code": done.exit_code,
            "output": "\n".join(lines[-_EVIDENCE_LINES:]),
            "seconds": round(time.monotonic() - started, 3),
            "remarks": list(verifier.remarks),
        }
        if done.timed_out:
            raise GradingError(f"The tests did not end within {task.limits.verifier_seconds:g} s.")
        try:
            grade = Grade(*_reward(texts[REWARD_JSON], texts[REWARD_TEXT], evidence))
            if done.running and grade.reward > 0:
                raise GradingError(
                    f"{done.running} processes were still running when the tests ended, and might have "
                    "written the reward themselves: let the tests end what they start."
                )
            return grade
        except GradingError as error:
            tail = (
                f" The tests ended with status {done.exit_code}; their last line: {lines[-1]}"
                if lines
                else ""
            )
            raise GradingError(f"{error}{tail}") from None


def _reward(
    json_text: bytes | None, text: bytes | None, evidence: dict[str, Any]
) -> tuple[float, dict[str, Any]]:
    if json_text is None and text is None:
        raise GradingError(f"The tests wrote neither {REWARD_JSON} nor {REWARD_TEXT}.")
    if json_text is None:
        assert text is not None
        return rewards.from_text(text, REWARD_TEXT), {**evidence, "source": REWARD_TEXT}
    reward, metrics = rewards.from_json(json_text, REWARD_JSON)
    if text is not None and rewards.from_text(text, REWARD_TEXT) != reward:
        raise GradingError(f"{REWARD_JSON} and {REWARD_TEXT} disagree.")
    return reward, {**evidence, "source": REWARD_JSON, "metrics": metrics}


async def _carry_out(step: dockerfile.Copy | dockerfile.Run, context: Path, sandbox: Sandbox) -> None:
    if isinstance(step, dockerfile.Run):
        done = await sandbox.exec(step.command, cwd=step.cwd, env=step.env, timeout=SETUP_SECONDS)
        if done.exit_code != 0:
            raise SandboxError(
                f"Line {step.line} of {context / 'Dockerfile'} failed with status {done.exit_code}: "
                f"{(done.stderr or done.stdout).strip()[-300:]}"
            )
        return
    for source, target in dockerfile.sources(context, step):
        await sandbox.upload(source, target)
        if step.mode is not None:
            await sandbox.exec(f"chmod -R {step.mode} {shlex.quote(target)}")


def _interpreter(tree: Path | Mapping[str, str], name: str) -> list[str]:
    """The words of a script's `#!` line; bash where it has none. The file need not be executable."""
    text = (tree / name).read_text(errors="replace") if isinstance(tree, Path) else tree[name]
    first = text.partition("\n")[0]
    return first[2:].split() if first.startswith("#!") else ["/bin/bash"]


def _resolved(task: Task, key: str) -> dict[str, str]:
    return resolve_references(task.metadata.get(key, {}), f"{key.replace('_', '.')} of task {task.id}")


def _trusted_path(path: str) -> str:
    """System directories first: the tests find no program that the agent could have put in their way."""
    system = _SYSTEM_PATH.split(":")
    return ":".join([*system, *(part for part in path.split(":") if part and part not in system)])
