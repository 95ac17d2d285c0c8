import pickle
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titogym.envs.registry import STARTER, task_directories
from titogym.envs.task import Limits
from titogym.envs.terminal_bench import load_task, resolve_references
from titogym.errors import UserError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A small task that is valid."""
    write(tmp_path, "task.toml", 'schema_version = "1.4"\n')
    write(tmp_path, "instruction.md", "Do it.\n")
    write(tmp_path, "tests/test.sh", "#!/bin/sh\n")
    write(tmp_path, "solution/solve.sh", "#!/bin/sh\n")
    write(tmp_path, "environment/Dockerfile", "FROM debian\nWORKDIR /app\n")
    return tmp_path


def write(directory: Path, name: str, text: str) -> None:
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(text)


def test_a_task_with_all_its_fields(directory):
    write(
        directory,
        "task.toml",
        """
version = "1.0"
[task]
name = "me/example"
[metadata]
difficulty = "hard"
author_name = "Somebody"
[agent]
timeout_sec = 30
[verifier]
timeout_sec = 12.5
[verifier.env]
KEY = "${TITOGYM_TEST_KEY}"
[environment]
cpus = 2
memory = "1.5G"
storage_mb = 100
allow_internet = true
workdir = "/data"
[environment.env]
A = "${TITOGYM_TEST_A:-1}"
""",
    )
    task = load_task(directory)
    assert task.id == "me/example"
    assert task.instruction == "Do it.\n"
    assert task.limits == Limits(
        agent_seconds=30, verifier_seconds=12.5, cpus=2, memory_mb=1536, storage_mb=100
    )
    assert (task.network, task.workdir, task.env) == ("open", "/data", {"A": "1"})
    assert task.metadata["difficulty"] == "hard"
    assert task.metadata["unknown_keys"] == []
    assert task.metadata["verifier_env"] == {"KEY": "${TITOGYM_TEST_KEY}"}
    assert pickle.loads(pickle.dumps(task)) == task


def test_what_is_not_said_has_safe_defaults(directory):
    (directory / "solution" / "solve.sh").unlink()
    task = load_task(directory)
    assert (task.id, task.network, task.workdir) == (directory.name, "none", "/app")
    assert task.limits == Limits()
    assert task.solution is None


def test_unknown_keys_are_tolerated_and_listed(directory):
    write(
        directory,
        "task.toml",
        "future = 1\n[agent]\ntimeout_sec = 5\nmood = 'calm'\n[environment.tools]\nx = 1\n",
    )
    assert load_task(directory).metadata["unknown_keys"] == ["agent.mood", "environment.tools", "future"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    key=st.from_regex(r"[a-z_]{1,12}", fullmatch=True),
    value=st.sampled_from(["1", '"x"', "[1]", "{ a = 1 }"]),
)
def test_no_unknown_key_is_an_error(directory, key, value):
    write(directory, "task.toml", f"zz_{key} = {value}\n[verifier]\nzz_{key} = {value}\n")
    assert load_task(directory).metadata["unknown_keys"] == [f"verifier.zz_{key}", f"zz_{key}"]


@pytest.mark.parametrize(
    "canary",
    ["<!-- the canary GUID 123 -->", "# BENCHMARK DATA: canary 26b5", "<!-- CANARY -->\n\n# canary again"],
)
def test_canary_lines_are_stripped(directory, canary):
    write(directory, "instruction.md", f"{canary}\n\n# A heading\n\nThe canary in the text stays.\n")
    assert load_task(directory).instruction == "# A heading\n\nThe canary in the text stays.\n"


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("task.toml", "a = [", "task.toml is not valid TOML"),
        ("task.toml", "agent = 3", "must be a table"),
        ("task.toml", "[agent]\ntimeout_sec = 'long'", "agent.timeout_sec"),
        ("task.toml", "[agent]\ntimeout_sec = -1", "agent.timeout_sec"),
        ("task.toml", "[agent]\ntimeout_sec = inf", "agent.timeout_sec is inf"),
        ("task.toml", "[environment]\nenv = { \"A=B\" = 'x' }", "environment.env sets 'A=B'"),
        ("task.toml", '[environment]\nenv = { A = "\\u0000" }', "environment.env sets 'A'"),
        ("task.toml", "[environment]\nmemory = 'lots'", "environment.memory"),
        ("task.toml", "[verifier]\nenv = 1", "verifier.env"),
        ("task.toml", "[environment]\nworkdir = 'app'", "environment.workdir is 'app'"),
        ("task.toml", "[environment]\nworkdir = '/usr/src'", "environment.workdir is '/usr/src'"),
        ("instruction.md", "\n\n", "instruction.md is empty"),
        (
            "environment/Dockerfile",
            "FROM debian\nCOPY nothing.txt /app\n",
            "nothing.txt, which does not exist",
        ),
        ("environment/Dockerfile", "FROM debian\nRUN apt-get install gcc\n", "container backend: .*apt-get"),
        ("environment/Dockerfile", "FROM node:22\n", "container backend: .*node:22"),
        ("environment/docker-compose.yaml", "services: {}\n", r"container backend: .*docker-compose\.yaml"),
        ("environment/.dockerignore", "x\n", r"container backend: .*\.dockerignore"),
        ("task.toml", "[environment]\ngpus = 1", "container backend: .*environment.gpus = 1"),
        ("task.toml", "[agent]\nuser = 'agent'", "container backend: .*agent.user"),
        ("task.toml", "[agent]\nnetwork_mode = 'public'", "container backend: .*agent.network_mode"),
        ("task.toml", "[environment]\nallowed_hosts = ['x.org']", "container backend: .*allowed_hosts"),
        ("task.toml", "[environment]\nenv = { A = '${TITOGYM_TEST_NO}' }", "set the environment variable"),
        ("task.toml", "[[steps]]\nname = 'one'", "container backend: .*steps"),
        ("task.toml", "[environment]\nos = 'windows'", "container backend: .*environment.os"),
    ],
)
def test_what_is_wrong_is_named(directory, name, text, named):
    write(directory, name, text)
    with pytest.raises(UserError, match=named):
        load_task(directory)


@pytest.mark.parametrize("name", ["task.toml", "instruction.md", "environment/Dockerfile"])
def test_files_that_are_no_text_are_named(directory, name):
    (directory / name).write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=f"{name} is not UTF-8 text"):
        load_task(directory)


def test_an_instruction_that_is_a_directory_is_named(directory):
    (directory / "instruction.md").unlink()
    (directory / "instruction.md").mkdir()
    with pytest.raises(UserError, match=r"Cannot read .*instruction\.md: Is a directory"):
        load_task(directory)


@pytest.mark.parametrize("name", ["task.toml", "instruction.md", "tests/test.sh"])
def test_missing_files_are_named(directory, name):
    (directory / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        load_task(directory)


def test_a_prebuilt_image_alone_needs_a_container(directory):
    write(directory, "task.toml", "[environment]\ndocker_image = 'someone/image:1'\n")
    assert load_task(directory).workdir == "/app"  # the Dockerfile says how that image is made
    (directory / "environment" / "Dockerfile").unlink()
    with pytest.raises(UserError, match=r"container backend: .*someone/image:1"):
        load_task(directory)


def test_the_older_format_is_named(tmp_path):
    write(tmp_path, "task.yaml", "instruction: do it\n")
    with pytest.raises(UserError, match=r"task\.yaml is in the format of Terminal-Bench 1"):
        load_task(tmp_path)


def test_references_to_the_environment(monkeypatch):
    monkeypatch.setenv("TITOGYM_TEST_KEY", "secret")
    env = {"A": "${TITOGYM_TEST_KEY}", "B": "x${TITOGYM_TEST_OTHER:-y}z", "C": "plain"}
    assert resolve_references(env, "verifier.env") == {"A": "secret", "B": "xyz", "C": "plain"}
    with pytest.raises(UserError, match=r"verifier.env refers to \$\{TITOGYM_TEST_OTHER\}"):
        resolve_references({"A": "${TITOGYM_TEST_OTHER}"}, "verifier.env")


@pytest.mark.parametrize("directory", task_directories(STARTER), ids=lambda directory: directory.name)
def test_starter_tasks_say_all_that_a_task_can_say(directory):
    task = load_task(directory)
    assert task.id == f"titogym/{directory.name}"
    assert task.solution is not None
    assert task.network == "none"
    assert task.metadata["unknown_keys"] == []
    assert task.metadata["description"].endswith(".")
    assert {"difficulty", "category", "tags"} <= set(task.metadata)
