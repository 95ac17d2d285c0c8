"""Turns what a verifier wrote into a reward, finite and within [0, 1], or a `GradingError`."""

import json
import math
from dataclasses import replace
from typing import Any

from titogym.envs.task import Grade, GradingError


def checked(value: object, source: str) -> float:
    """`value` as a reward. Raises `GradingError` unless it is a finite number within [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GradingError(f"{source} holds {value!r}, which is not a number.")
    if isinstance(value, float) and not math.isfinite(value):
        raise GradingError(f"{source} holds {value!r}; a reward is finite.")
    if not 0 <= value <= 1:
        raise GradingError(f"{source} holds {value!r}; a reward is within [0, 1].")
    return float(value)


def verified(grade: object, environment: str) -> Grade:
    """What an environment's `grade` returned. Raises `GradingError` unless it is a `Grade` with a reward."""
    if not isinstance(grade, Grade):
        raise GradingError(
            f"The environment {environment!r} returned {str(grade)[:80]!r} from grade: return a Grade."
        )
    return replace(grade, reward=checked(grade.reward, f"The grade of the environment {environment!r}"))


def from_text(content: bytes, source: str) -> float:
    """The reward of a `reward.txt`: one number."""
    try:
        return checked(float(content.decode().strip()), source)
    except ValueError:
        raise GradingError(f"{source} holds {_excerpt(content)}, which is not a number.") from None


def from_json(content: bytes, source: str) -> tuple[float, dict[str, Any]]:
    """The reward of a `reward.json` and all its metrics.

    A bare number, an object with the key `reward`, or an object with a single metric.
    """
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        raise GradingError(f"{source} holds {_excerpt(content)}, which is not JSON.") from None
    if not isinstance(parsed, dict):
        return checked(parsed, source), {}
    metrics = {name: _metric(value, f"{source}, {name!r},") for name, value in parsed.items()}
    if "reward" in metrics:
        return checked(metrics["reward"], source), metrics
    if len(metrics) == 1:
        return checked(next(iter(metrics.values())), source), metrics
    raise GradingError(f"{source} has no 'reward' among its metrics {sorted(metrics)}.")


def test_report(content: bytes) -> dict[str, Any]:
    """What a CTRF report says of the single tests: numbers by status, and the names of those that failed.

    It is evidence, never the reward; one that cannot be read says so under `error`.
    """
    try:
        results = json.loads(content)["results"]
        tests = [(str(test["name"]), str(test["status"])) for test in results["tests"]]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        return {"error": f"The report of the tests cannot be read: {type(error).__name__}: {error}"[:200]}
    failed = [name[:200] for name, status in tests if status == "failed"]
    return {
        "tests": len(tests),
        **{word: sum(status == word for _, status in tests) for word in ("passed", "failed", "skipped")},
        "failed_names": failed[:20],
    }


def _metric(value: object, source: str) -> object:
    """Every metric must be a finite number, the reward among them; only the reward is within [0, 1]."""
    finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    if isinstance(value, bool) or not finite:
        raise GradingError(f"{source} holds {value!r}, which is not a finite number.")
    return value


def _excerpt(content: bytes) -> str:
    return repr(content[:80].decode(errors="replace")) if content else "nothing"
