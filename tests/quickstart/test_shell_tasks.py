"""The generated task family: honest splits, solvable tasks, a test that notices everything."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.envs.conftest import backend, sandboxes
from titogym.envs import shell_tasks
from titogym.envs.registry import tasks
from titogym.envs.sandboxes.base import SandboxSpec
from titogym.envs.terminal import TerminalEnvironment
from titogym.errors import UserError

__all__ = ["backend", "sandboxes"]

NAME = re.compile(r"[a-z]+-[a-z]+")
KINDS = len(shell_tasks.KINDS)


def words(task):
    """Every name in what the agent can see or must produce."""
    texts = [task.instruction, *task.files, *task.files.values(), *task.tests, *task.tests.values()]
    return {name for text in texts for name in NAME.findall(text)}


def test_no_name_of_a_test_task_stands_in_a_training_task():
    seen = set().union(*(words(task) for task in tasks("shell", split="train", count=600)))
    held_out = set().union(*(words(task) for task in tasks("shell", split="test", count=300)))
    assert len(held_out) > 100
    assert not seen & held_out


@given(st.sampled_from(["train", "test"]), st.integers(0, 2**31), st.integers(1, 40))
@settings(max_examples=30)
def test_a_series_is_fixed_by_split_and_seed(split, seed, count):
    first = shell_tasks.tasks(split, seed, count)
    assert first == shell_tasks.tasks(split, seed, count + 5)[:count]
    assert len({task.id for task in first}) == count
    assert words(first[0]) != words(shell_tasks.tasks(split, seed + 1, 1)[0])


@given(st.sampled_from(["train", "test"]), st.integers(0, 2**31), st.integers(0, 10_000))
@settings(max_examples=100)
def test_every_task_asks_for_a_change_and_keeps_a_bystander(split, seed, index):
    made = shell_tasks.problem(split, seed, index)
    assert made.files != made.expected
    assert set(made.files.items()) & set(made.expected.items())


def test_an_unknown_split_is_refused():
    with pytest.raises(UserError, match=r"no split 'dev'.*train"):
        shell_tasks.tasks("dev")


@pytest.mark.sandbox
@pytest.mark.parametrize("index", range(2 * KINDS))
async def test_the_solution_passes_and_doing_nothing_fails(backend, index):
    task = shell_tasks.tasks("test", 0, 2 * KINDS)[index]
    assert await graded(backend, task, solve=True) == 1.0
    assert await graded(backend, task, solve=False) == 0.0


@pytest.mark.sandbox
@pytest.mark.parametrize("harm", ["touch extra.txt", "rm -f *", "mkdir d && mv *.txt d"])
async def test_harm_beside_the_job_fails(backend, harm):
    task = shell_tasks.tasks("test", 0, 1)[0]
    assert await graded(backend, task, solve=True, then=harm) == 0.0


async def graded(backend, task, *, solve, then=None):
    environment = TerminalEnvironment()
    sandbox = await backend.create(SandboxSpec.for_task(task, {}))
    try:
        await environment.setup(task, sandbox)
        if solve:
            assert (await environment.solve(task, sandbox)).exit_code == 0
        if then:
            await sandbox.exec(then)
        await sandbox.kill_processes()
        return (await environment.grade(task, sandbox)).reward
    finally:
        await sandbox.destroy()
