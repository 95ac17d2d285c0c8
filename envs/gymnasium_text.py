"""gymnasium environments whose observations can be read: `gymnasium?id=my_package:MyEnv-v0`.

The model is told each observation as a text, and its answer is the action: the text itself for a `Text`
space, the last whole number in it for a `Discrete` one. The environment runs in the driver, in a thread.
The reward is the sum of all steps', mapped from [low, high] to [0, 1].
"""

import asyncio
import hashlib
import re
from typing import Any, Literal

from titogym.envs.dealing import Split
from titogym.envs.environment import Action, Observation, user
from titogym.envs.rewards import checked
from titogym.envs.sandboxes.base import Sandbox
from titogym.envs.task import Grade, GradingError, Limits, Task
from titogym.errors import UserError, install_extra

_NUMBER = re.compile(r"-?\d{1,18}")


def tasks(
    id: str,
    split: Split = "train",
    seed: int = 0,
    count: int = 100,
    turns: int = 50,
    low: float = 0.0,
    high: float = 1.0,
    instruction: str = "",
    arguments: dict[str, Any] | None = None,
) -> list[Task]:
    """Episodes of the environment `id` with seeds of their own, different ones for each split.

    turns: most steps. low, high: sums of rewards that become 0 and 1; what lies beyond is cut.
    instruction: put ahead of the first observation. arguments: of `gymnasium.make`.
    Raises `UserError` for an environment that does not exist or whose actions cannot be written.
    """
    if not low < high:
        raise UserError(f"gymnasium: low = {low:g} must be below high = {high:g}.")
    _make(id, arguments or {}).close()
    return [
        Task(
            id=f"{id.rpartition(':')[2]}-{split}-{seed}-{index}",
            instruction=instruction,
            environment="gymnasium",
            limits=Limits(turns=turns),
            split=split,
            metadata={
                "id": id,
                "seed": _seed(split, seed, index),
                "low": low,
                "high": high,
                "arguments": arguments or {},
            },
        )
        for index in range(count)
    ]


class GymnasiumText:
    name = "gymnasium"
    interactive: Literal[True] = True
    needs_sandbox = False

    def __init__(self) -> None:
        self._inner: Any = None
        self._rewards: list[float] = []

    async def reset(self, task: Task, sandbox: Sandbox | None) -> Observation:
        known = task.metadata
        self._inner = await asyncio.to_thread(_make, known["id"], known["arguments"])
        seen, _ = await asyncio.to_thread(self._inner.reset, seed=known["seed"])
        return Observation((user(f"{task.instruction}\n\n{seen}".strip()),))

    async def step(self, action: Action) -> Observation:
        space = self._inner.action_space
        taken = _read(action.content, space)
        if taken is None:
            return Observation((user(f"That is no action. {_form(space)}"),))
        seen, reward, terminated, truncated, _ = await asyncio.to_thread(self._inner.step, taken)
        self._rewards.append(float(reward))
        return Observation((user(str(seen)),), done=bool(terminated or truncated))

    async def grade(self, task: Task, sandbox: Sandbox | None) -> Grade:
        low, high = task.metadata["low"], task.metadata["high"]
        total = sum(self._rewards)
        if not abs(total) < float("inf"):
            raise GradingError(f"The rewards of {task.metadata['id']} add up to {total}; a reward is finite.")
        share = min(1.0, max(0.0, (total - low) / (high - low)))
        return Grade(checked(share, task.metadata["id"]), {"total": total, "rewards": list(self._rewards)})

    async def close(self) -> None:
        if self._inner is not None:
            await asyncio.to_thread(self._inner.close)


def _make(id: str, arguments: dict[str, Any]) -> Any:
    try:
        import gymnasium
    except ImportError:
        raise UserError(f"gymnasium environments need an extra: {install_extra('gymnasium')}.") from None
    try:
        made = gymnasium.make(id, **arguments)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise UserError(f"gymnasium cannot make {id!r}: {error}") from error
    if not _is_text(made.action_space) and not _is_discrete(made.action_space):
        made.close()
        raise UserError(
            f"The actions of {id!r} are {made.action_space}; a model can write those of a Text or Discrete "
            f"space."
        )
    return made


def _read(content: str, space: Any) -> Any:
    """The action that the model wrote, None if it is not in the space."""
    if _is_text(space):
        action: Any = content.strip()
        return action if space.contains(action) else None
    found = _NUMBER.findall(content)
    number = int(found[-1]) if found else None
    return number if number is not None and space.contains(number) else None


def _form(space: Any) -> str:
    if _is_text(space):
        return f"An action has {space.min_length} to {space.max_length} of the letters that are allowed."
    return f"An action is a whole number from {space.start} to {space.start + space.n - 1}."


def _is_text(space: Any) -> bool:
    from gymnasium.spaces import Text

    return isinstance(space, Text)


def _is_discrete(space: Any) -> bool:
    from gymnasium.spaces import Discrete

    return isinstance(space, Discrete)


def _seed(split: Split, seed: int, index: int) -> int:
    """Even seeds train, odd ones test."""
    digest = hashlib.sha256(f"{split}/{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:3], "big") * 2 + (split == "test")
