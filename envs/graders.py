"""Graders for answers that are texts: small functions that return a `Grade`, made to be combined.

grader = weighted({"says so": (1, regex(r"total")), "is right": (3, numeric(42, tolerance=0.5))})
grade = await grader("The total is 41.8")

A grade's evidence names the grader and what it saw, part by part. What cannot be judged is a
`GradingError`, never a number. Judges that are models are in `judges`.
"""

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from titogym.envs import rewards
from titogym.envs.sandboxes.base import SandboxBackend, SandboxSpec
from titogym.envs.task import Grade, GradingError, Limits
from titogym.envs.verifier import verify

Grader = Callable[[str], Awaitable[Grade]]

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_NUMBER_CHARACTERS = 300  # longest number that is read


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
        last = numbers[-1].replace(",", "") if numbers else ""
        found = _number(last) if 0 < len(last) <= _NUMBER_CHARACTERS else None
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
        directory, _, name = file.rpartition("/")
        sandbox = await backend.create(SandboxSpec(limits=limits, labels={"purpose": "code tests"}))
        try:
            await sandbox.upload({name: code_of(answer)}, directory)
            return await verify(sandbox, tests, env={}, seconds=limits.verifier_seconds)
        finally:
            await sandbox.destroy()

    return grade


def code_of(answer: str) -> str:
    """The last fenced block of an answer, or all of it if there is none."""
    blocks = _FENCE.findall(answer)
    return blocks[-1] if blocks else answer


def by(function: Callable[..., Any], **given: Any) -> Grader:
    """The verdict of a function of your own, called as `function(answer, **given)`; it may be async.

    It returns a `Grade`, a number within [0, 1] or a bool. Any exception of it is a `GradingError`.
    """
    name = getattr(function, "__qualname__", repr(function))

    async def grade(answer: str) -> Grade:
        try:
            found = function(answer, **given)
            if inspect.isawaitable(found):
                found = await found
        except GradingError:
            raise
        except Exception as error:
            raise GradingError(f"The grader {name} failed: {type(error).__name__}: {error}") from error
        if isinstance(found, Grade):
            return Grade(rewards.checked(found.reward, name), {"grader": name, **found.evidence})
        number = float(found) if isinstance(found, bool) else found
        return Grade(rewards.checked(number, name), {"grader": name})

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


def weighted(parts: Mapping[str, tuple[float, Grader]]) -> Grader:
    """A rubric: the mean of named grades, each with its weight. Weights are positive."""
    weights = {name: weight for name, (weight, _) in parts.items()}
    total = check_weights(weights)

    async def grade(answer: str) -> Grade:
        grades = {name: await grader(answer) for name, (_, grader) in parts.items()}
        evidence = {
            name: {"reward": part.reward, "weight": weights[name], **part.evidence}
            for name, part in grades.items()
        }
        reward = math.fsum(weights[name] * part.reward for name, part in grades.items()) / total
        return Grade(min(1.0, reward), {"grader": "weighted", "parts": evidence})

    return grade


def threshold(grader: Grader, at: float) -> Grader:
    """1 if the grade is at least `at`, else 0."""

    async def grade(answer: str) -> Grade:
        inner = await grader(answer)
        part = {"reward": inner.reward, **inner.evidence}
        return Grade(float(inner.reward >= at), {"grader": "threshold", "at": at, "parts": [part]})

    return grade


def check_weights(weights: Mapping[str, float]) -> float:
    """The sum of a rubric's weights. Raises `ValueError` unless there is one and all are positive."""
    if not weights:
        raise ValueError("a rubric needs at least one part")
    if wrong := [name for name, weight in weights.items() if not 0 < weight < math.inf]:
        raise ValueError(f"the weight of {wrong[0]!r} is {weights[wrong[0]]!r}; weights are positive")
    return math.fsum(weights.values())


def _number(text: str) -> float:
    """Whole numbers stay exact, however long they are."""
    return int(text) if text.lstrip("+-").isdecimal() else float(text)


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
