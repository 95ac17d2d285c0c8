"""A game of several turns: guess a number; each wrong guess is told to be too low or too high.

The guesses suffice for a player who halves the range each time. Level 1 has 7 numbers and 3 guesses.
"""

import random
import re
from typing import Literal

from titogym.envs.dealing import Split, deal
from titogym.envs.environment import Action, Observation, user
from titogym.envs.sandboxes.base import Sandbox
from titogym.envs.task import Grade, Limits, Task

Level = Literal[1, 2, 3, 4]

_GUESSES = {1: 3, 2: 5, 3: 7, 4: 10}
_START = 1000  # ranges begin below this
_INSTRUCTION = (
    "I am thinking of a whole number from {low} to {high}. You have {guesses} guesses. Answer with your "
    "guess alone: one number. After each wrong guess I say whether it was too low or too high."
)
_NUMBER = re.compile(r"-?\d{1,18}")


def tasks(split: Split = "train", seed: int = 0, count: int = 100, level: Level = 1) -> list[Task]:
    """Games of one level. Raises `UserError` for a split that does not exist."""
    guesses = _GUESSES[level]
    size = 2**guesses - 1

    def draw(choose: random.Random) -> tuple[int, int]:
        low = choose.randint(0, _START)
        return low, low + choose.randrange(size)

    # Ranges, not secrets, are dealt out: of a range that training saw the test knows nothing.
    games = deal(f"guess-{level}", split, seed, count, draw, lambda game: f"{game[0]} of {size}")
    return [
        Task(
            id=f"guess-{level}-{split}-{seed}-{index}",
            instruction=_INSTRUCTION.format(low=low, high=low + size - 1, guesses=guesses),
            environment="guess",
            limits=Limits(turns=guesses, agent_seconds=120.0),
            split=split,
            metadata={
                "level": level,
                "low": low,
                "high": low + size - 1,
                "secret": secret,
                "guesses": guesses,
            },
        )
        for index, (low, secret) in enumerate(games)
    ]


class Guessing:
    """The last number in an answer is the guess. An answer without a number uses one up."""

    name = "guess"
    interactive: Literal[True] = True
    needs_sandbox = False

    async def reset(self, task: Task, sandbox: Sandbox | None) -> Observation:
        known = task.metadata
        self._low, self._high, self._secret = known["low"], known["high"], known["secret"]
        self._left: int = known["guesses"]
        self._guesses: list[int | None] = []
        return Observation((user(task.instruction),))

    async def step(self, action: Action) -> Observation:
        found = _NUMBER.findall(action.content)
        guess = int(found[-1]) if found else None
        self._guesses.append(guess)
        self._left -= 1
        if guess == self._secret or self._left == 0:
            return Observation(done=True)
        if guess is None:
            text = "That is no number."
        elif guess < self._secret:
            self._low = max(self._low, guess + 1)
            text = f"{guess} is too low."
        else:
            self._high = min(self._high, guess - 1)
            text = f"{guess} is too high."
        return Observation((user(f"{text} Guesses left: {self._left}."),))

    async def grade(self, task: Task, sandbox: Sandbox | None) -> Grade:
        right = bool(self._guesses) and self._guesses[-1] == self._secret
        return Grade(float(right), {"secret": self._secret, "guesses": list(self._guesses)})

    async def close(self) -> None:
        pass

    def reference(self) -> Action:
        """The next action of a perfect player."""
        return Action(str((self._low + self._high) // 2))
