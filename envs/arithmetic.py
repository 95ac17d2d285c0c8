"""Arithmetic in several steps, with a calculator that does one operation at a time.

Level 1 has one operation on numbers of one digit; each level has more operations and longer numbers.
"""

import random
from dataclasses import dataclass
from typing import Literal

from titogym.envs.dealing import Split, deal
from titogym.envs.environment import DONE, Action, Observation, ToolCall, user
from titogym.envs.graders import numeric
from titogym.envs.sandboxes.base import Sandbox
from titogym.envs.task import Grade, Limits, Task
from titogym.envs.tools import Toolbox

Level = Literal[1, 2, 3, 4]
Operation = Literal["+", "-", "*"]

_OPERATIONS: tuple[Operation, ...] = ("+", "-", "*")
_STEPS = {1: 1, 2: 2, 3: 3, 4: 5}
_LARGEST = {1: 9, 2: 99, 3: 999, 4: 9999}
_BOUND = 10**30  # of the calculator


@dataclass(frozen=True, slots=True)
class Problem:
    """`steps` are the operations that give `answer`, inner ones first."""

    expression: str
    answer: int
    steps: tuple[tuple[int, Operation, int], ...]

    @property
    def instruction(self) -> str:
        return f"What is {self.expression}? End with the number alone."


def tasks(split: Split = "train", seed: int = 0, count: int = 100, level: Level = 1) -> list[Task]:
    """Tasks of one level. Raises `UserError` for a split that does not exist."""
    problems = deal(
        f"arithmetic-{level}", split, seed, count, lambda choose: draw(choose, level), lambda p: p.expression
    )
    return [
        Task(
            id=f"arithmetic-{level}-{split}-{seed}-{index}",
            instruction=problem.instruction,
            environment="arithmetic",
            limits=Limits(turns=len(problem.steps) + 4, agent_seconds=120.0),
            split=split,
            metadata={
                "level": level,
                "answer": problem.answer,
                "steps": problem.steps,
            },
        )
        for index, problem in enumerate(problems)
    ]


def draw(choose: random.Random, level: Level) -> Problem:
    """A random expression of the level's size, fully bracketed inside."""
    steps: list[tuple[int, Operation, int]] = []

    def build(operations: int) -> tuple[str, int]:
        if operations == 0:
            number = choose.randint(0, _LARGEST[level])
            return str(number), number
        left = choose.randint(0, operations - 1)
        (a_text, a), (b_text, b) = build(left), build(operations - 1 - left)
        operation = choose.choice(_OPERATIONS)
        steps.append((a, operation, b))
        return f"({a_text} {operation} {b_text})", apply(a, operation, b)

    text, answer = build(_STEPS[level])
    return Problem(text[1:-1], answer, tuple(steps))


def apply(a: int, operation: Operation, b: int) -> int:
    match operation:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b


class Arithmetic:
    """The model may call the calculator; the last number of its first answer without a call counts."""

    name = "arithmetic"
    interactive: Literal[True] = True
    needs_sandbox = False

    def __init__(self) -> None:
        self._tools = Toolbox(self.calculate)
        self._answer = ""

    async def reset(self, task: Task, sandbox: Sandbox | None) -> Observation:
        self._task = task
        self._ahead = list(task.metadata["steps"])
        return Observation((user(task.instruction),), self._tools.tools)

    async def step(self, action: Action) -> Observation:
        if action.tool_calls:
            return Observation(await self._tools.answer(action))
        self._answer = action.content
        return DONE

    async def grade(self, task: Task, sandbox: Sandbox | None) -> Grade:
        return await numeric(task.metadata["answer"])(self._answer)

    async def close(self) -> None:
        pass

    async def calculate(self, a: int, operation: Operation, b: int) -> str:
        """Calculate one operation on two whole numbers."""
        if max(abs(a), abs(b)) > _BOUND:
            raise ValueError("the numbers are too large for this calculator")
        return str(apply(a, operation, b))

    def reference(self) -> Action:
        """The next action of a perfect player."""
        if self._ahead:
            a, operation, b = self._ahead.pop(0)
            arguments = f'{{"a": {a}, "operation": "{operation}", "b": {b}}}'
            return Action(tool_calls=(ToolCall(f"step-{len(self._ahead)}", "calculate", arguments),))
        return Action(str(self._task.metadata["answer"]))
