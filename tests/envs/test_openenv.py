"""OpenEnv both ways, with its real servers and its real client, in an environment of their own.

`openenv_program` does it all in one process there (half a minute of imports); the tests look at what it
printed. What needs no OpenEnv is tested here directly.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from titogym import venvs
from titogym.envs import registry
from titogym.envs.environment import Action
from titogym.envs.openenv.client import OpenEnv, _text, tasks
from titogym.envs.openenv.server import application
from titogym.envs.sandboxes.base import SandboxError
from titogym.errors import UserError

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checks(sandboxes):
    python = venvs.ensure("openenv", [["openenv==0.10.0"]], uv=True)
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("openenv_program.py"))],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TITOGYM_SANDBOXES": str(sandboxes)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not os.listdir(sandboxes), "a session left a sandbox behind"
    return json.loads(done.stdout)


@pytest.fixture
def theirs(checks):
    return checks["theirs"]


@pytest.fixture
def ours(checks):
    return checks["ours"]


@pytest.mark.sandbox
class TestTheirServers:
    def test_a_server_of_texts_is_talked_to(self, theirs):
        seen = theirs["text"]
        assert seen["tools"] == []
        (first,), (echoed,), _ = seen["seen"]
        assert first.startswith("say ")
        assert echoed == "hello"
        assert (seen["done"], seen["reward"], seen["rewards"], seen["steps"]) == (True, 1.0, [0.0, 1.0], 2)

    def test_a_structured_action_is_a_tool(self, theirs):
        seen = theirs["structured"]
        (tool,) = seen["tools"]
        assert tool["name"] == "act"
        assert set(tool["parameters"]["properties"]) == {"direction", "far"}
        assert tool["parameters"]["required"] == ["direction"]
        assert seen["seen"][0] == ['Walk.\n\n{"x": 0, "wall": false}']
        assert (seen["done"], seen["reward"]) == (True, 1.0)

    def test_tools_of_mcp_are_offered_and_called(self, theirs):
        seen = theirs["mcp"]
        (tool,) = seen["tools"]
        assert (tool["name"], tool["description"]) == ("add", "Add two numbers.")
        assert set(tool["parameters"]["properties"]) == {"a", "b"}
        _, (right,), (mistyped,), (unknown,), _ = seen["seen"]
        assert right == "42"
        assert mistyped.startswith("error: ")
        assert "none" in unknown
        assert (seen["done"], seen["reward"]) == (True, 1.0)

    def test_what_the_model_gets_wrong_is_told_to_it(self, theirs):
        seen = theirs["wrong actions"]
        said = [text for (text,) in seen["seen"][1:]]
        assert said[:3] == [
            "error: the arguments must be a JSON object",
            "error: the arguments must be a JSON object",
            "error: there is no tool 'fly', only act",
        ]
        assert "does not take this action" in said[3]
        assert seen["steps"] == 1

    def test_what_is_not_the_models_fault_is_an_error(self, theirs):
        assert theirs["no action"]["error"].startswith("GradingError: The OpenEnv server gave no reward")
        assert "fell off" in theirs["their fault"]["error"]
        assert "does not describe the actions" in theirs["nobody there"]["error"]
        assert "at capacity" in theirs["full"]["error"]


@pytest.mark.sandbox
class TestOurServer:
    def test_a_question_is_answered(self, ours):
        first = ours["right"]["first"]
        assert first["messages"][0]["role"] == "user"
        assert first["tools"][0]["function"]["name"] == "calculate"
        assert (ours["right"]["done"], ours["right"]["reward"]) == (True, 1.0)
        assert ours["right"]["first"]["task_id"].endswith("-2")
        assert (ours["wrong"]["done"], ours["wrong"]["reward"]) == (True, 0.0)
        assert ours["wrong"]["last"]["evidence"]["found"] == -1

    def test_tools_are_called(self, ours):
        assert ours["tools"]["steps"] == 2
        assert ours["tools"]["last"]["evidence"]["found"] == 42

    def test_wrong_requests_are_refused(self, ours):
        assert "index is 4; there are 4 tasks" in ours["no such task"]["error"]
        assert "VALIDATION_ERROR" in ours["no such action"]["error"]

    def test_sessions_do_not_mix(self, ours):
        assert ours["at once"]["rewards"] == [1.0] * 8

    def test_a_terminal_task_runs_in_a_sandbox(self, ours):
        seen = ours["sandbox"]
        assert seen["first"]["tools"][0]["function"]["name"] == "bash"
        assert (seen["done"], seen["reward"], seen["steps"]) == (True, 1.0, 3)

    def test_the_command_serves(self, ours):
        assert ours["command"]["line"].startswith("OpenEnv server at http://127.0.0.1:")
        assert (ours["command"]["done"], ours["command"]["reward"]) == (True, 1.0)


def test_tasks_differ_by_seed_and_splits_share_none():
    train = tasks("train", 0, 5, "http://h:1")
    assert train == tasks("train", 0, 5, "http://h:1")
    seeds = {task.metadata["reset"]["seed"] for task in train}
    assert len(seeds) == 5
    assert not seeds & {task.metadata["reset"]["seed"] for task in tasks("test", 0, 50, "http://h:1")}
    indexed = registry.tasks("openenv?url=http://h:1&indexed=true&count=2&split=test")
    assert [task.metadata["reset"] for task in indexed] == [
        {"split": "test", "index": 0},
        {"split": "test", "index": 1},
    ]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("openenv", "url=http://HOST:PORT"),
        ("openenv?url=ftp://x", "url=http://HOST:PORT"),
        ("openenv?url=http://x&reward=mean", "reward"),
    ],
)
def test_wrong_options_are_named(source, said):
    with pytest.raises(UserError, match=said):
        registry.tasks(source)


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"echoed": "hi", "reward": 1.0, "done": False, "metadata": {}}, "hi"),
        ({"a": 1, "b": "x"}, '{"a": 1, "b": "x"}'),
        ({"done": True}, ""),
        (
            {"tool_name": "t", "result": {"content": [{"type": "text", "text": "one"}, {"type": "image"}]}},
            "one",
        ),
        ({"tool_name": "t", "result": {"data": 3}}, "3"),
        ({"tool_name": "t", "result": "plain"}, "plain"),
        ({"tool_name": "t", "error": {"message": "no"}}, "error: no"),
    ],
)
def test_observations_become_texts(observation, text):
    assert _text(observation) == text


async def test_a_reward_that_is_no_number_is_the_servers_failure():
    class Client:
        async def step(self, action):
            return SimpleNamespace(observation={}, reward=["much"], done=False)

    environment = OpenEnv()
    environment._client, environment._text_field = Client(), "message"
    with pytest.raises(SandboxError, match=r"its reward is .*much.*no number"):
        await environment.step(Action("hello", ()))


async def test_without_openenv_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    monkeypatch.setitem(sys.modules, "openenv.core.env_server", None)
    task = tasks(url="http://h:1")[0]
    with pytest.raises(UserError, match=r"pip install -e '/.*\[openenv\]'"):
        await OpenEnv().reset(task, None)
    with pytest.raises(UserError, match=r"pip install -e '/.*\[openenv\]'"):
        application([task], None)  # type: ignore[arg-type]
