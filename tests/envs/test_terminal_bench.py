import pickle
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from titogym.cli.main import app
from titogym.envs.registry import STARTER, task_directories
from titogym.envs.sandboxes.base import Build, SandboxSpec
from titogym.envs.task import AllowList, Limits
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
    assert task.limits == Limits(verifier_seconds=600)
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
        ("task.toml", "agent = 3", "agent is 3"),
        ("task.toml", "[agent]\ntimeout_sec = 'long'", "agent.timeout_sec is 'long'"),
        ("task.toml", "[agent]\ntimeout_sec = -1", "agent.timeout_sec is -1"),
        ("task.toml", "[agent]\ntimeout_sec = inf", "agent.timeout_sec is inf"),
        ("task.toml", "[environment]\nenv = { \"A=B\" = 'x' }", "environment.env.* 'A=B' as a variable"),
        ("task.toml", '[environment]\nenv = { A = "\\u0000" }', "environment.env.* 'A' as a variable"),
        ("task.toml", "[environment]\nmemory = 'lots'", "environment.memory is 'lots'"),
        ("task.toml", "[environment]\nmemory = '1G'\nmemory_mb = 7", "'1G' contradicts memory_mb = 7"),
        (
            "task.toml",
            "[environment]\nstorage_mb = 99999999999999",
            "environment.storage_mb is 99999999999999",
        ),
        ("task.toml", "[environment]\ncpus = 0.0001", "environment.cpus is 0.0001"),
        ("task.toml", "[verifier]\nenv = 1", "verifier.env is 1"),
        ("task.toml", "[task]\nname = 'alone'", "'alone' must have the form organisation/name"),
        ("task.toml", "[environment]\nworkdir = 'app'", "environment.workdir is 'app'"),
        ("task.toml", "[environment]\nworkdir = '/usr/src'", "environment.workdir is '/usr/src'"),
        ("task.toml", "[environment]\nnetwork_mode = 'some'", "environment.network_mode is 'some'"),
        ("task.toml", "[environment]\nallowed_hosts = ['x.org']", "needs network_mode = 'allowlist'"),
        (
            "task.toml",
            "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['https://x.org']",
            "an allowed host is a host name",
        ),
        ("task.toml", "[metadata.titogym]\nscrub = 'all'", "scrub must be a list"),
        ("task.toml", "[metadata.titogym]\nscrub = ['git']", "scrub has 'git'"),
        ("task.toml", "[metadata.titogym]\nscrub = ['/']", "scrub has '/'"),
        ("instruction.md", "\n\n", "instruction.md is empty"),
        (
            "environment/Dockerfile",
            "FROM debian\nCOPY nothing.txt /app\n",
            "nothing.txt, which does not exist",
        ),
        ("environment/docker-compose.yaml", "services: {}\n", r"does not run .*docker-compose\.yaml"),
        ("task.toml", "[environment]\ngpus = 1", "does not run .*environment.gpus = 1"),
        ("task.toml", "[agent]\nuser = 'agent'", "does not run .*agent.user"),
        ("task.toml", "[verifier]\nuser = 1000", "does not run .*verifier.user = 1000"),
        ("task.toml", "[agent]\nnetwork_mode = 'public'", "agent.network_mode = 'public' differs"),
        (
            "task.toml",
            "[verifier]\nenvironment_mode = 'separate'",
            "does not run .*verifier.environment_mode",
        ),
        ("task.toml", "[verifier.environment]\ncpus = 1", "does not run .*verifier.environment"),
        ("task.toml", "[[verifier.collect]]\ncommand = 'x'", "does not run .*verifier.collect"),
        ("task.toml", "[[environment.mcp_servers]]\nname = 'x'", "does not run .*environment.mcp_servers"),
        ("task.toml", "[environment.tpu]\ntype = 'v4'", "does not run .*environment.tpu"),
        ("task.toml", "[environment]\nenv = { A = '${TITOGYM_TEST_NO}' }", "set the environment variable"),
        ("task.toml", "[[steps]]\nname = 'one'", "does not run .*steps"),
        ("task.toml", "[environment]\nos = 'Windows'", "does not run .*environment.os"),
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


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("environment/Dockerfile", "FROM debian\nRUN apt-get install gcc\n", "apt-get"),
        ("environment/Dockerfile", "FROM node:22\n", "node:22"),
        ("environment/.dockerignore", "x\n", ".dockerignore"),
    ],
)
def test_what_needs_an_image_is_said_and_refused_where_there_are_none(directory, name, text, reason):
    write(directory, name, text)
    task = load_task(directory)
    (said,) = task.metadata["needs_image"]
    assert reason in said
    assert SandboxSpec.for_task(task).image == Build(directory / "environment", 600.0)


def test_a_prebuilt_image_is_pulled_where_the_dockerfile_needs_one(directory):
    write(directory, "task.toml", "[environment]\ndocker_image = 'someone/image:1'\n")
    task = load_task(directory)
    assert (task.image, task.workdir) == (None, "/app")  # its Dockerfile says how that image is made
    write(directory, "environment/Dockerfile", "FROM node:22\nWORKDIR /srv/app\n")
    task = load_task(directory)
    assert SandboxSpec.for_task(task).image == "someone/image:1"
    assert (task.workdir, task.network) == ("/srv/app", "open")
    (directory / "environment" / "Dockerfile").unlink()
    assert "someone/image:1" in load_task(directory).metadata["needs_image"][0]


@pytest.mark.parametrize(
    ("said", "network"),
    [
        ("network_mode = 'public'", "open"),
        ("network_mode = 'no-network'", "none"),
        ("allow_internet = true", "open"),
        ("allow_internet = false", "none"),
        ("network_mode = 'no-network'\nallow_internet = true", "none"),
        (
            "network_mode = 'allowlist'\nallowed_hosts = ['PyPI.org.', '*.x.org', '10.0.0.0/8', '::1']",
            AllowList(("pypi.org", "*.x.org", "10.0.0.0/8", "::1")),
        ),
    ],
)
def test_networks(directory, said, network):
    write(directory, "task.toml", f"[environment]\n{said}\n")
    assert load_task(directory).network == network


def test_a_phase_may_repeat_the_network_of_the_environment(directory):
    write(
        directory,
        "task.toml",
        "[environment]\nnetwork_mode = 'public'\n[agent]\nnetwork_mode = 'public'\n",
    )
    assert load_task(directory).network == "open"


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


def test_tasks_that_need_images_are_refused_before_a_local_run_begins(directory):
    write(directory, "environment/Dockerfile", "FROM node:22\n")
    done = CliRunner().invoke(app, ["run", str(directory), "--engine", "http://127.0.0.1:9"])
    assert isinstance(done.exception, UserError)
    assert "1 of 1 tasks need images" in str(done.exception)
    assert "node:22" in str(done.exception)
