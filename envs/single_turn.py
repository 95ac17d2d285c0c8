"""Questions with one answer: the model is told the prompt, and its one message is graded.

The task's metadata names the grader and what it needs (see `jsonl_tasks`), so that tasks stay data.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from titogym import dotted, options
from titogym.envs import graders, judges
from titogym.envs.environment import DONE, Action, Message, Observation, user
from titogym.envs.graders import Grader
from titogym.envs.sandboxes.base import Sandbox
from titogym.envs.task import Grade, Task
from titogym.envs.verifier import verify
from titogym.errors import UserError

SOLUTION = "solution.py"


class Question:
    """One prompt, one answer."""

    name = "question"
    interactive: Literal[True] = True
    needs_sandbox = False

    def __init__(self) -> None:
        self._answer: str | None = None

    async def reset(self, task: Task, sandbox: Sandbox | None) -> Observation:
        prompt: list[Message] = task.metadata.get("prompt") or [user(task.instruction)]
        return Observation(tuple(prompt))

    async def step(self, action: Action) -> Observation:
        self._answer = action.content
        return DONE

    async def grade(self, task: Task, sandbox: Sandbox | None) -> Grade:
        if not (self._answer or "").strip():
            return Grade(0.0, {"why": "there is no answer"})
        return await grader_of(task)(self._answer or "")

    async def close(self) -> None:
        pass


class CodeQuestion(Question):
    """The answer's code (its last fenced block) is tested in the sandbox, where it is solution.py."""

    name = "code_question"
    needs_sandbox = True

    async def grade(self, task: Task, sandbox: Sandbox | None) -> Grade:
        assert sandbox is not None
        if not (self._answer or "").strip():
            return Grade(0.0, {"why": "there is no answer"})
        if task.tests is None:
            raise UserError(f"Task {task.id} has no tests.")
        await sandbox.upload({SOLUTION: graders.code_of(self._answer or "")}, task.workdir)
        return await verify(sandbox, task.tests, env=task.env, seconds=task.limits.verifier_seconds)


# --- graders by name ------------------------------------------------------------------------------


def grader_of(task: Task) -> Grader:
    """The grader that the task's metadata names. Raises `UserError`."""
    known = task.metadata
    return make_grader(
        known.get("grader", "exact"),
        known.get("grader_options", {}),
        {"answer": known.get("answer"), "info": known.get("info"), "question": task.instruction},
    )


def make_grader(name: str, given: Mapping[str, Any], facts: Mapping[str, Any]) -> Grader:
    """A grader by name or dotted path, with options; `facts` are what the task says: answer, info, question.

    A dotted path names a function `grade(completion, answer, info, question)`, of which it may leave out what
    it does not need; `given` are further arguments. It returns a `Grade`, a number within [0, 1] or a bool.
    """
    if name in GRADERS:
        factory = GRADERS[name]
        needed = _taken(factory, facts)
        return factory(**options.fitted(factory, {**needed, **given}, f"The grader {name!r}"))
    if "." not in name and ":" not in name:
        raise UserError(
            f"There is no grader {name!r}: choose one of {', '.join(sorted(GRADERS))}, or a dotted path."
        )
    function = dotted.load(name, "grader")
    needed = {**_taken(function, facts), **given}
    try:
        inspect.signature(function).bind("", **needed)
    except TypeError as error:
        raise UserError(
            f"The grader {name!r} cannot be called with (completion, {', '.join(needed)}): {error}."
        ) from None
    return graders.by(function, **needed)


def _taken(function: Callable[..., Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `facts` that the function has parameters for."""
    parameters = inspect.signature(function).parameters
    return {name: fact for name, fact in facts.items() if name in parameters}


def _exact(answer: str | int | float, ignore_case: bool = False) -> Grader:
    return graders.exact(str(answer), ignore_case=ignore_case)


def _numeric(answer: int | float, tolerance: float = 0.0) -> Grader:
    return graders.numeric(answer, tolerance=tolerance)


def _regex(answer: str) -> Grader:
    """The record's answer is the pattern."""
    try:
        return graders.regex(answer)
    except re.error as error:
        raise UserError(f"The answer {answer!r} is no regular expression: {error}.") from None


def _judge(
    question: str,
    base_url: str,
    model: str,
    answer: str | int | float | None = None,
    criterion: str = "The submission answers the question correctly.",
    api_key_env: str = "OPENAI_API_KEY",
) -> Grader:
    known = f"The question:\n{question}" + (f"\n\nA right answer:\n{answer}" if answer is not None else "")
    judge = judges.Judge(base_url, model, api_key_env)
    return judges.judged(judge, criterion, context=known)


GRADERS: dict[str, Callable[..., Grader]] = {
    "exact": _exact,
    "numeric": _numeric,
    "regex": _regex,
    "judge": _judge,
}
