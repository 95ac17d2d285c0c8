import json
from typing import Any

import pytest

from titogym.envs import registry
from titogym.envs.environment import Action
from titogym.envs.sandboxes.base import SandboxSpec
from titogym.envs.task import Grade
from titogym.errors import UserError


def write(path, *records):
    path.write_text("".join(json.dumps(r) + "\n" if not isinstance(r, str) else r + "\n" for r in records))
    return path


async def graded(task, answer, backend=None) -> Grade:
    environment: Any = registry.environment(task.environment)
    sandbox = await backend.create(SandboxSpec.for_task(task)) if environment.needs_sandbox else None
    try:
        await environment.reset(task, sandbox)
        assert (await environment.step(Action(answer))).done
        grade: Grade = await environment.grade(task, sandbox)
        return grade
    finally:
        if sandbox is not None:
            await sandbox.destroy()


def half(completion: str, answer: str, info: dict[str, int]) -> float:
    """A grader of a user's own."""
    return info["points"] / 2 if completion == answer else 0.0


async def test_questions_are_tasks_in_their_order(tmp_path):
    path = write(
        tmp_path / "sums.jsonl",
        {"question": "2 + 2?", "answer": 4},
        "",
        {
            "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "1 + 1?"}],
            "answer": "2",
        },
        {"prompt": "0 + 0?", "answer": 0, "id": "zero"},
    )
    tasks = registry.tasks(f"{path}?grader=numeric&system=Be brief.")
    assert [task.id for task in tasks] == ["sums-1", "sums-3", "zero"]
    assert [task.instruction for task in tasks] == ["2 + 2?", "1 + 1?", "0 + 0?"]
    first = await registry.environment("question").reset(tasks[1], None)
    assert [message["content"] for message in first.messages] == ["Be brief.", "S", "1 + 1?"]
    assert [(await graded(task, "it is 4")).reward for task in tasks] == [1, 0, 0]
    assert (await graded(tasks[0], " ")).reward == 0
    assert len(registry.tasks(str(path) + "?count=2")) == 2
    assert {task.id for task in registry.tasks(f"{path}?seed=4")} == {"sums-1", "sums-3", "zero"}


async def test_graders_by_name_and_of_ones_own(tmp_path):
    path = write(tmp_path / "q.jsonl", {"question": "?", "answer": "Yes", "info": {"points": 1}})

    async def reward(query: str, answer: str) -> float:
        (task,) = registry.tasks(f"{path}?{query}")
        return (await graded(task, answer)).reward

    assert await reward("grader=exact", "Yes") == 1
    assert await reward("grader=exact", "yes") == 0
    assert await reward("grader=exact&ignore_case=true", "yes") == 1
    assert await reward("grader=regex", "oh Yes!") == 1
    assert await reward(f"grader={__name__}:half", "Yes") == 0.5


async def test_a_number_as_the_exact_answer(tmp_path):
    path = write(tmp_path / "q.jsonl", {"question": "?", "answer": 4})
    assert (await graded(registry.tasks(str(path))[0], "4")).reward == 1


def test_a_pattern_that_is_none_is_named(tmp_path):
    path = write(tmp_path / "q.jsonl", {"question": "?", "answer": "("})
    with pytest.raises(UserError, match=r"q\.jsonl:1: The answer '\(' is no regular expression"):
        registry.tasks(f"{path}?grader=regex")


def test_splits_of_the_records(tmp_path):
    path = write(
        tmp_path / "q.jsonl",
        {"question": "a", "answer": "1", "split": "train"},
        {"question": "b", "answer": "1", "split": "test"},
    )
    assert [task.instruction for task in registry.tasks(str(path))] == ["a"]
    assert [task.instruction for task in registry.tasks(f"{path}?split=test")] == ["b"]


@pytest.mark.sandbox
async def test_code_is_tested_in_the_sandbox(tmp_path, backend):
    path = write(
        tmp_path / "code.jsonl", {"question": "double?", "tests": "from solution import f\nassert f(4) == 8"}
    )
    (task,) = registry.tasks(str(path))
    right = "```python\ndef f(n):\n    return 2 * n\n```"
    assert (await graded(task, right, backend)).reward == 1
    for wrong in (
        "def f(n): return n",
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "not python",
        "",
    ):
        assert (await graded(task, wrong, backend)).reward == 0, wrong


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"answer": 1}', "needs a question or a prompt"),
        ('{"question": "a", "prompt": "b", "answer": 1}', "not both"),
        ('{"question": "", "answer": 1}', "must be a text that is not empty"),
        ('{"question": 3, "answer": 1}', "must be a text"),
        ('{"prompt": [], "answer": 1}', "list of chat messages"),
        ('{"prompt": [{"role": "robot", "content": "x"}], "answer": 1}', "a message of the prompt"),
        ('{"prompt": [{"role": "assistant", "content": "x"}], "answer": 1}', "must be the user's"),
        ('{"question": "a"}', "has no answer, which the grader 'numeric' needs"),
        ('{"question": "a", "answer": "many"}', "answer = 'many'"),
        ('{"question": "a", "answers": 1}', "has the field 'answers'"),
        ('{"question": "a", "answer": 1, "split": "dev"}', "split is 'dev'"),
        ('{"question": "a", "tests": 7}', "tests is Python"),
        ('{"question": "a", "answer": 1, "id": "first"}', "has the id 'first' of"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, sentence):
    path = write(tmp_path / "q.jsonl", {"question": "?", "answer": 1, "id": "first"}, line)
    with pytest.raises(UserError, match=sentence) as caught:
        registry.tasks(f"{path}?grader=numeric")
    assert f"{path}:2" in str(caught.value)


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("grader=magic", "There is no grader 'magic': choose one of exact"),
        ("grader=numeric&slack=1", "it takes answer, tolerance"),
        ("grader=os.path:join2", "join2"),
        ("grader=json:loads&cls=1&zzz", "KEY=VALUE"),
        ("count=many", "count = 'many'"),
    ],
)
def test_wrong_options_are_named(tmp_path, query, sentence):
    path = write(tmp_path / "q.jsonl", {"question": "?", "answer": 1})
    with pytest.raises(UserError, match=sentence):
        registry.tasks(f"{path}?{query}")


def test_an_empty_file_and_one_that_is_no_text(tmp_path):
    with pytest.raises(UserError, match="has no question"):
        registry.tasks(str(write(tmp_path / "empty.jsonl")))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read"):
        registry.tasks(str(tmp_path / "bytes.jsonl"))
