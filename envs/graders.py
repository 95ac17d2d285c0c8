"""Graders for answers that are texts: small functions that return a `Grade`, made to be combined.

grader = all_of(regex(r"total"), numeric(42, tolerance=0.5))
grade = await grader("The total is 41.8")
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from titogym.envs.sandboxes.base import SandboxBackend, SandboxSpec
from titogym.envs.task import Grade, Limits
from titogym.envs.verifier import verify

Grader = Callable[[str], Awaitable[Grade]]

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_FENCE = re.compile(r"```[^\n]*\n(.*?)```", re.DOTALL)


def exact(expected: str, *, ignore_case: bool = False) -> Grader:
    """1 if the answer is `expected`, white space at the edges aside."""

    def form(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    return _judge("exact", lambda answer: (form(answer) == form(expected), {"expected": expected}))


def regex(pattern: str, flags: re.RegexFlag = re.NOFLAG) -> Grader:
    """1 if the pattern is found in the answer."""
    compiled = re.compile(pattern, flags)

    def found(answer: str) -> tuple[bool, dict[str, Any]]:
        match = compiled.search(answer)
        return match is not None, {"pattern": pattern, "match": match and match[0]}

    return _judge("regex", found)


def numeric(expected: float, *, tolerance: float = 0.0) -> Grader:
    """1 if the last number in the answer is within `tolerance` (absolute) of `expected`.

    Commas group digits, as in 1,234.5.
    """

    def close(answer: str) -> tuple[bool, dict[str, Any]]:
        numbers = _NUMBER.findall(answer)
        found = float(numbers[-1].replace(",", "")) if numbers else None
        return found is not None and abs(found - expected) <= tolerance, {
            "expected": expected,
            "found": found,
        }

    return _judge("numeric", close)


def code_tests(
    backend: SandboxBackend,
    tests: Path | Mapping[str, str],
    *,
    file: str = "/workspace/solution.py",
    limits: Limits | None = None,
) -> Grader:
    """The reward of `tests/test.sh` over the answer's code, laid at `file` in a sandbox of its own.

    The code is the last fenced block of the answer, or all of it if there is none.
    """
    limits = limits or Limits(memory_mb=512, storage_mb=128)

    async def grade(answer: str) -> Grade:
        blocks = _FENCE.findall(answer)
        directory, _, name = file.rpartition("/")
        sandbox = await backend.create(SandboxSpec(limits=limits, labels={"purpose": "code tests"}))
        try:
            await sandbox.upload({name: blocks[-1] if blocks else answer}, directory)
            return await verify(sandbox, tests, env={}, seconds=limits.verifier_seconds)
        finally:
            await sandbox.destroy()

    return grade


def all_of(*graders: Grader) -> Grader:
    """The lowest of several grades."""
    return _combine("all_of", graders, min)


def any_of(*graders: Grader) -> Grader:
    """The highest of several grades."""
    return _combine("any_of", graders, max)


def mean_of(*graders: Grader) -> Grader:
    """The mean of several grades."""
    return _combine("mean_of", graders, lambda rewards: sum(rewards) / len(rewards))


def _judge(name: str, judge: Callable[[str], tuple[bool, dict[str, Any]]]) -> Grader:
    async def grade(answer: str) -> Grade:
        right, evidence = judge(answer)
        return Grade(float(right), {"grader": name, **evidence})

    return grade


def _combine(name: str, graders: Sequence[Grader], reduce: Callable[[Sequence[float]], float]) -> Grader:
    if not graders:
        raise ValueError(f"{name} needs at least one grader")

    async def grade(answer: str) -> Grade:
        grades = [await grader(answer) for grader in graders]
        evidence = {"grader": name, "parts": [{"reward": part.reward, **part.evidence} for part in grades]}
        return Grade(reduce([part.reward for part in grades]), evidence)

    return grade
