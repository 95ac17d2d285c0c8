"""Grading after the agent is gone: a test script in a fresh sandbox over the agent's files."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titogym.envs import rewards
from titogym.envs.sandboxes.base import SYSTEM_PATH, Sandbox
from titogym.envs.task import Grade, GradingError

TESTS = "/tests"
SCRIPT = "test.sh"
REWARD_JSON = "/logs/verifier/reward.json"
REWARD_TEXT = "/logs/verifier/reward.txt"
CTRF = "/logs/verifier/ctrf.json"  # Common Test Report Format, as plugins of many test runners write it
_REWARD_BYTES = 1 << 16
_REPORT_BYTES = 1 << 20
_OUTPUT_BYTES = 1 << 18
_EVIDENCE_LINES = 40


async def verify(
    sandbox: Sandbox, tests: Path | Mapping[str, str], *, env: Mapping[str, str], seconds: float
) -> Grade:
    """Run `tests/test.sh` over what the agent left in `sandbox`, which is used up.

    No process of the agent is left, `/logs` is empty, and the tests appear, unwritable, at `/tests` only
    now; see `Sandbox.successor` for the system's programs. The script writes `/logs/verifier/reward.txt`
    or `reward.json`; a reward that is missing, doubtful, not finite or outside [0, 1] is a `GradingError`.
    """
    started = time.monotonic()
    env = {**env, "PYTHONNOUSERSITE": "1"}
    if "PATH" in env:  # else it is the backend's or the image's
        env["PATH"] = _trusted_path(env["PATH"])
    verifier = await sandbox.successor(read_only={TESTS: tests}, env=env)
    try:
        done = await verifier.exec(
            [*interpreter(tests, SCRIPT), f"{TESTS}/{SCRIPT}"], timeout=seconds, max_output=_OUTPUT_BYTES
        )
        await verifier.kill_processes()  # whatever the tests started must not touch the reward any more
        json_text = await verifier.read(REWARD_JSON, _REWARD_BYTES)
        text = await verifier.read(REWARD_TEXT, _REWARD_BYTES)
        report = await verifier.read(CTRF, _REPORT_BYTES)
    finally:
        await verifier.destroy()
    lines = (done.stdout + done.stderr).strip().splitlines()
    evidence: dict[str, Any] = {
        "exit_code": done.exit_code,
        "output": "\n".join(lines[-_EVIDENCE_LINES:]),
        "seconds": round(time.monotonic() - started, 3),
        "remarks": list(verifier.remarks),
    }
    if report is not None:
        evidence["tests"] = rewards.test_report(report)
    if done.timed_out:
        raise GradingError(f"The tests did not end within {seconds:g} s.")
    try:
        if done.exit_code > 128:  # a program under test may have written a reward and killed the script
            raise GradingError(f"The tests were killed by signal {done.exit_code - 128}.")
        grade = _grade(json_text, text, evidence)
        if done.running and grade.reward > 0:
            raise GradingError(
                f"{done.running} processes were still running when the tests ended, and might have written "
                "the reward themselves: let the tests end what they start."
            )
    except GradingError as error:
        tail = f" The tests ended with status {done.exit_code}; their last line: {lines[-1]}" if lines else ""
        raise GradingError(f"{error}{tail}") from None
    return grade


def interpreter(tree: Path | Mapping[str, str], name: str) -> list[str]:
    """The words of a script's `#!` line; bash where it has none. The file need not be executable."""
    text = (tree / name).read_text(errors="replace") if isinstance(tree, Path) else tree[name]
    first = text.partition("\n")[0]
    return first[2:].split() if first.startswith("#!") else ["/bin/bash"]


def _grade(json_text: bytes | None, text: bytes | None, evidence: dict[str, Any]) -> Grade:
    if json_text is None and text is None:
        raise GradingError(f"The tests wrote neither {REWARD_JSON} nor {REWARD_TEXT}.")
    if json_text is None:
        assert text is not None
        return Grade(rewards.from_text(text, REWARD_TEXT), {**evidence, "source": REWARD_TEXT})
    reward, metrics = rewards.from_json(json_text, REWARD_JSON)
    if text is not None and rewards.from_text(text, REWARD_TEXT) != reward:
        raise GradingError(f"{REWARD_JSON} and {REWARD_TEXT} disagree.")
    return Grade(reward, {**evidence, "source": REWARD_JSON, "metrics": metrics})


def _trusted_path(path: str) -> str:
    """System directories first: the tests find no program that the agent could have put in their way."""
    system = SYSTEM_PATH.split(":")
    return ":".join([*system, *(part for part in path.split(":") if part and part not in system)])
