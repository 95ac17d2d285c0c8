"""The adapter over real gymnasium environments, made here and registered as any other."""

from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Box, Discrete, Text

from titogym.envs import registry
from titogym.envs.environment import Action
from titogym.errors import UserError


class Corridor(gymnasium.Env):
    """Walk from a random place to the right end; each step costs a little."""

    observation_space = Text(max_length=100)
    action_space = Discrete(2)

    def __init__(self, length=4):
        self.length, self.closed = length, False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(0, self.length))
        return self._seen(), {}

    def step(self, action):
        self.place = max(0, self.place + (1 if action else -1))
        done = self.place >= self.length
        return self._seen(), 10.0 if done else -1.0, done, False, {}

    def _seen(self):
        return f"You are at {self.place} of {self.length}."


class Echo(gymnasium.Env):
    observation_space = Text(max_length=10)
    action_space = Text(max_length=5, min_length=1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "say hi", {}

    def step(self, action):
        return "", float(action == "hi"), True, False, {}


class Arm(gymnasium.Env):
    observation_space = Text(max_length=10)
    action_space = Box(0, 1)


@pytest.fixture(autouse=True, scope="module")
def registered():
    kinds: dict[str, Any] = {"Corridor-v0": Corridor, "Echo-v0": Echo, "Arm-v0": Arm}
    for name, kind in kinds.items():
        gymnasium.register(f"titogym_test/{name}", kind, disable_env_checker=True)
    yield
    for name in kinds:
        del gymnasium.registry[f"titogym_test/{name}"]


async def test_an_episode_with_discrete_actions():
    source = "gymnasium?id=titogym_test/Corridor-v0&low=-10&high=10&instruction=Go right."
    task = registry.tasks(source, count=1)[0]
    environment: Any = registry.environment("gymnasium")
    first = await environment.reset(task, None)
    text = first.messages[0]["content"]
    assert text.startswith("Go right.\n\nYou are at ")
    place = int(text.split()[-3])
    assert "whole number from 0 to 1" in (await environment.step(Action("left?"))).messages[0]["content"]
    assert not (await environment.step(Action("action 7, no: 9"))).done
    steps = 4 - place
    for number in range(1, steps + 1):
        observation = await environment.step(Action("I go: 1"))
        assert observation.done == (number == steps)
    grade = await environment.grade(task, None)
    assert grade.evidence["total"] == 10.0 - (steps - 1)
    assert grade.reward == pytest.approx((grade.evidence["total"] + 10) / 20)
    await environment.close()


@pytest.mark.parametrize(("said", "reward"), [(" hi \n", 1), ("ho", 0)])
async def test_an_episode_with_texts(said, reward):
    task = registry.tasks("gymnasium?id=titogym_test/Echo-v0", count=1)[0]
    environment: Any = registry.environment("gymnasium")
    await environment.reset(task, None)
    assert (await environment.step(Action("far too long"))).messages[0]["content"].startswith("That is no")
    assert (await environment.step(Action(said))).done
    assert (await environment.grade(task, None)).reward == reward
    await environment.close()


def test_seeds_differ_between_tasks_and_splits():
    def seeds(split):
        made = registry.tasks("gymnasium?id=titogym_test/Corridor-v0", split=split, count=50)
        return {task.metadata["seed"] for task in made}

    assert len(seeds("train")) == len(seeds("test")) == 50
    assert seeds("train").isdisjoint(seeds("test"))


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("id=titogym_test/Nowhere-v0", "gymnasium cannot make"),
        ("id=no_such_module:Env-v0", "gymnasium cannot make"),
        ("id=titogym_test/Arm-v0", "Text or Discrete"),
        ("id=titogym_test/Echo-v0&low=1&high=1", "must be below"),
        ('id=titogym_test/Echo-v0&arguments={"size": 3}', "gymnasium cannot make"),
        ("", "missing a required argument: 'id'"),
    ],
)
def test_what_cannot_be_made_is_refused(query, sentence):
    with pytest.raises(UserError, match=sentence):
        registry.tasks(f"gymnasium?{query}", count=1)
