"""Harness programs as data: what a TOML file may say, and what becomes of it in the sandbox."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.harnesses.world import PASS_IF_DONE, World, call, task
from titogym.cli.main import app
from titogym.errors import UserError
from titogym.harnesses.agent_program import AgentProgram
from titogym.harnesses.registry import harness
from titogym.harnesses.specification import built_in, read

MINE = """
title = "Mine"
protocol = "chat"
matcher = "strict"
driver = "driver.py"
command = ["{python}", "{driver}", "--effort={effort}", "--more={more}", "{instruction}"]

[options]
effort = "high"
fast = true
more = []

[env]
FAST = "{fast}"

[files]
"/root/.mine/config" = "{base_url} {model} {unknown}"

[mounts]
"data" = "/data"

[ending]
file = "/logs/agent/end.json"
key = "info.status"

[ending.outcomes]
tired = ["turn_limit", "It was tired."]
"""
DRIVER = """
import json, os, sys
print(sys.argv[1:], os.environ["FAST"], open("/root/.mine/config").read(), open("/data/x").read())
open("/workspace/done", "w")
status = "tired" if "--effort=none" in sys.argv else "well"
json.dump({"info": {"status": status}, "told": sys.argv[1:]}, open("/logs/agent/end.json", "w"))
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("mounted")
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "mine.toml").write_text(MINE)
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_mode & 0o5 != 0o5 and directory != Path("/"):
            directory.chmod(0o755)
    return tmp_path / "mine.toml"


@pytest.mark.sandbox
async def test_a_program_is_told_what_its_file_says(world: World, mine: Path) -> None:
    world.script(call("true"))
    made = harness(str(mine), more=["a", "b{model}"], fast=False, args=["--last"])
    assert (made.name, made.matcher) == ("mine", "strict")
    instruction = "Do {model}; $(rm -rf /)"
    result = await world.run(task(PASS_IF_DONE, instruction=instruction), made)
    assert (result.outcome, result.reward) == ("finished", 1.0), result
    words = ["--effort=high", "--more=a", "--more=btitogym", instruction, "--last"]
    assert f'"told": {words}'.replace("'", '"') in result.log


@pytest.mark.sandbox
async def test_how_it_ends_is_read_from_its_own_file(world: World, mine: Path) -> None:
    result = await world.run(task(PASS_IF_DONE), harness(str(mine), effort="none"))
    assert (result.outcome, result.error) == ("turn_limit", "It was tired.")


@pytest.mark.sandbox
def test_the_doctor_examines_it(mine: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "harness", "--json", str(mine)])
    assert result.exit_code == 1, result.output
    told = json.loads(result.stdout)
    assert (told["harness"], told["outcome"], told["turns"]) == ("mine", "finished", 0)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("protocol = 5", "wrong at protocol"),
        ("", "wrong at protocol: Field required"),
        ('protocol = "chat"\ncolour = "red"', "wrong at colour"),
        ('protocol = "chat"\ncommand = []', "wrong at command"),
        ('protocol = "chat"\n[install]\npython = "three"', "wrong at install.python"),
        ("protocol = ", "is no TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_what_is_wrong(tmp_path: Path, line: str, sentence: str) -> None:
    command = "" if "command" in line else 'command = ["x"]\n'
    (tmp_path / "mine.toml").write_text(f'title = "Mine"\n{command}{line}\n')
    with pytest.raises(UserError, match=sentence):
        harness(str(tmp_path / "mine.toml"))


def test_a_file_that_is_not_there_or_names_what_is_not_there(mine: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        harness(str(mine.with_name("other.toml")))
    mine.with_name("driver.py").unlink()
    with pytest.raises(UserError, match=r"driver\.py, which does not exist"):
        harness(str(mine))


def test_options_are_those_of_the_file_and_of_their_type(mine: Path) -> None:
    with pytest.raises(UserError, match="it takes effort, fast, more, args, matcher, policy, packages"):
        harness(str(mine), efort="low")
    with pytest.raises(UserError, match="fast = 'perhaps'"):
        harness(str(mine), fast="perhaps")
    assert harness(str(mine), matcher="call_id").matcher == "call_id"


def test_what_the_system_lacks_is_said(mine: Path) -> None:
    mine.write_text(MINE + '\n[install]\nsystem = ["no-such-program"]\n')
    made = harness(str(mine))
    with pytest.raises(UserError, match="needs no-such-program"):
        asyncio.run(made.prepare())


@pytest.mark.parametrize("name", built_in())
def test_every_program_that_comes_along_can_be_made(name: str) -> None:
    made = harness(name)
    assert isinstance(made, AgentProgram)
    install = read(built_in()[name]).install
    pinned = (*install.pypi, *install.npm)
    assert pinned
    assert all("=" in package or "@" in package[1:] for package in pinned)
