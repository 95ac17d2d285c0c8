"""The task families that come along: sound at every level, dealt out by seed, apart in the splits."""

import json
import pickle
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titogym.envs import registry
from titogym.envs.checking import check_tasks
from titogym.envs.environment import Action, ToolCall
from titogym.envs.sandboxes.base import SandboxSpec
from titogym.envs.terminal import TerminalEnvironment
from titogym.envs.text_to_sql import TextToSql, same_rows
from titogym.errors import UserError

LEVELS = {"arithmetic": (1, 2, 3, 4), "guess": (1, 2, 3, 4), "sql": (1, 2, 3), "edit": (1, 2, 3)}
EVERY = [f"{family}?level={level}" for family, levels in LEVELS.items() for level in levels]


@pytest.mark.sandbox
@pytest.mark.parametrize("source", EVERY)
async def test_the_reference_scores_1_and_doing_nothing_0(backend, source):
    count = 2 if source.startswith(("sql", "edit")) else 30
    tasks = registry.tasks(source, count=count, seed=3) + registry.tasks(source, split="test", count=1)
    reports = await check_tasks(tasks, backend, repeats=1, parallel=4)
    assert [report.verdict for report in reports if not report.sound] == []


@pytest.mark.parametrize("source", EVERY)
def test_the_splits_share_no_problem(source):
    seen = {
        split: {
            task.instruction
            for seed in (0, 1)
            for task in registry.tasks(source, split=split, seed=seed, count=20)
        }
        for split in ("train", "test")
    }
    assert len(seen["train"]) > 12
    assert len(seen["test"]) > 8
    assert seen["train"].isdisjoint(seen["test"])


def test_tasks_are_the_same_in_every_process():
    code = (
        "import sys, hashlib, pickle; from titogym.envs import registry\n"
        "for source in sys.argv[1:]:\n"
        "    print([(t.id, t.instruction, t.metadata, t.tests) for t in registry.tasks(source, count=2, "
        "seed=5)])"
    )
    words = [sys.executable, "-c", code, *EVERY]
    told = subprocess.run(
        words, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "77", "PATH": "/usr/bin"}
    ).stdout
    here = [
        str([(t.id, t.instruction, t.metadata, t.tests) for t in registry.tasks(source, count=2, seed=5)])
        for source in EVERY
    ]
    assert told.splitlines() == here


@settings(max_examples=10)
@given(seed=st.integers(0, 1000), count=st.integers(1, 6))
def test_a_longer_series_begins_with_the_shorter(seed, count):
    for family in ("arithmetic", "guess"):
        longer = registry.tasks(family, seed=seed, count=count + 3)
        assert registry.tasks(family, seed=seed, count=count) == longer[:count]
        assert pickle.loads(pickle.dumps(longer)) == longer


@pytest.mark.parametrize("level", [0, 9, "hard"])
def test_a_level_that_does_not_exist_is_refused(level):
    with pytest.raises(UserError, match=r"'arithmetic' cannot be made with level.*1, 2, 3 or 4"):
        registry.tasks(f"arithmetic?level={level}")


async def first_of(source: str):
    task = registry.tasks(source, count=1)[0]
    environment = registry.environment(task.environment)
    return task, environment, await environment.reset(task, None)


async def test_the_calculator_does_one_operation_at_a_time():
    task, environment, first = await first_of("arithmetic?level=4")
    assert [tool.name for tool in first.tools] == ["calculate"]
    call = ToolCall("1", "calculate", '{"a": 6, "operation": "*", "b": -7}')
    assert [m["content"] for m in (await environment.step(Action(tool_calls=(call,)))).messages] == ["-42"]
    done = await environment.step(Action(f"It is 1, no: {task.metadata['answer']}"))
    assert done.done
    assert (await environment.grade(task, None)).reward == 1


@pytest.mark.parametrize(
    ("said", "reward"), [(["x", "{secret}"], 1), (["0", "0", "0"], 0), (["{secret}"], 1)]
)
async def test_guessing(said: Sequence[str], reward):
    task, environment, _ = await first_of("guess?level=1")
    for number, text in enumerate(said, 1):
        observation = await environment.step(Action(text.format(**task.metadata)))
        assert observation.done == (number == len(said))
        if not observation.done:
            assert f"Guesses left: {3 - number}" in observation.messages[0]["content"]
    assert (await environment.grade(task, None)).reward == reward


# --- SQL ------------------------------------------------------------------------------------------


@pytest.fixture
async def shop(backend):
    """Asks the database, and grades answers, in one sandbox."""
    task = registry.tasks("sql?level=2", count=1)[0]
    sandbox = await backend.create(SandboxSpec.for_task(task))
    environment = TextToSql()
    await environment.reset(task, sandbox)

    async def ask(query: str) -> str:
        call = ToolCall("1", "sql", json.dumps({"query": query}))
        return str((await environment.step(Action(tool_calls=(call,)))).messages[0]["content"])

    async def grade(answer: str):
        await environment.step(Action(answer))
        return await environment.grade(task, sandbox)

    yield task, ask, grade
    await sandbox.destroy()


@pytest.mark.sandbox
async def test_queries_see_the_database_and_nothing_else(shop):
    _, ask, _ = shop
    assert await ask("SELECT 1 AS one, NULL, x'ff'") == "one | NULL | x'ff'\n1 | NULL | 0xff"
    assert "(more rows)" in await ask("SELECT * FROM orders")
    assert "price" in await ask("PRAGMA table_info(products)")
    for wrong in (
        "SELEKT 1",
        "SELECT 1; SELECT 2",
        "DELETE FROM orders",
        "DROP TABLE orders",
        "CREATE TABLE x (y)",
        "ATTACH '/etc/passwd' AS p",
        "VACUUM INTO '/tmp/copy.db'",
        "PRAGMA temp_store_directory = '/tmp'",
        "SELECT load_extension('/tmp/x.so')",
        "",
    ):
        assert (await ask(wrong)).startswith("error:") or wrong == "", wrong
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n"
    assert await ask(endless) == "error: the query takes too long"


@pytest.mark.sandbox
async def test_an_answer_must_hold_on_the_hidden_database_too(shop):
    task, _, grade = shop
    rows = task.metadata["expected"][0]
    spelled = " UNION ALL ".join("SELECT " + ", ".join(repr(value) for value in row) for row in rows)
    for answer, reward, why in (
        (f"So: ```sql\n{task.metadata['query']};\n```", 1, None),
        (task.metadata["query"], 1, None),
        (spelled, 0, "hidden"),
        ("SELECT 1", 0, "shown"),
        ("DROP TABLE orders", 0, "not authorized"),
        ("I do not know.", 0, "syntax error"),
        ("", 0, "no query"),
    ):
        result = await grade(answer)
        assert result.reward == reward, (answer, result.evidence)
        assert why is None or why in result.evidence["why"]


def test_rows_are_compared_as_bags_or_lists():
    assert same_rows([[1, "a"], [2, None]], [[2, None], [1, "a"]], ordered=False)
    assert not same_rows([[1], [1], [2]], [[1], [2], [2]], ordered=False)
    assert not same_rows([[1], [2]], [[2], [1]], ordered=True)
    assert same_rows([[0.1 + 0.2]], [[0.3]], ordered=True)
    assert not same_rows([[1]], [["1"]], ordered=False)


# --- edit -----------------------------------------------------------------------------------------


@pytest.mark.sandbox
@pytest.mark.parametrize(
    "cheat",
    [
        "while True: pass",
        "import os; os._exit(0)",
        "import sys; print('[]'); sys.exit(0)",
        "import os; os.system('echo 1 > /logs/verifier/reward.txt'); raise SystemExit(1)",
    ],
)
async def test_code_that_ends_its_test_early_scores_0(backend, cheat):
    task = registry.tasks("edit?level=1", count=1)[0]
    sandbox = await backend.create(SandboxSpec.for_task(task))
    try:
        environment = TerminalEnvironment()
        await environment.reset(task, sandbox)
        (name,) = task.files
        await sandbox.upload({name: cheat + "\n" + task.files[name]}, task.workdir)
        await sandbox.kill_processes()
        assert (await environment.grade(task, sandbox)).reward == 0
    finally:
        await sandbox.destroy()
