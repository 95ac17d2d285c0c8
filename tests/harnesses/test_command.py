"""Programs that run inside the sandbox and reach the gateway, and only that, through a loopback port."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.doubles.scripted_engine import Fault
from tests.harnesses.world import PASS_IF_DONE, World, call, say, task
from titogym.cli import attempting
from titogym.envs.sandboxes.docker.backend import DockerBackend
from titogym.envs.sandboxes.local import LocalBackend
from titogym.errors import UserError
from titogym.gateway.client import GatewayClient
from titogym.harnesses.command import Command, fill
from titogym.harnesses.episode import run_episode
from titogym.harnesses.warm import enclosed
from titogym.trainer import episodes
from titogym.trainer.config.sections import GatewaySection, RolloutSection, RunConfig, TrainerSection

pytestmark = pytest.mark.sandbox

AGENT = '''
"""A tool loop of the standard library: argv[1] is the file with the instruction."""
import json, os, subprocess, sys, urllib.request

TOOL = {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}
messages = [{"role": "user", "content": open(sys.argv[1]).read()}]

def ask():
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages,
            "tools": [{"type": "function", "function": TOOL}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]

while True:
    messages.append(ask())
    calls = messages[-1].get("tool_calls")
    if not calls:
        break
    for call in calls:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
print("said:", messages[-1]["content"])
'''


@pytest.fixture(scope="module")
def agent() -> Iterator[Command]:
    """The agent lives where the sandbox's user could not go by itself."""
    home = Path(tempfile.mkdtemp(prefix="titogym-agent-"))
    program = home / "private" / "agent"
    program.mkdir(parents=True)
    (program / "agent.py").write_text(AGENT)
    yield Command("python3 /agent/agent.py {instruction_file}", mount={str(program): "/agent"})
    shutil.rmtree(home)


async def test_an_attempt_is_graded_and_its_tokens_are_those_of_the_engine(
    world: World, agent: Command
) -> None:
    world.script(call("cat notes.txt; touch done"), say("It is done."))
    result = await world.run(task(PASS_IF_DONE, instruction="Mark it as done."), agent)
    assert (result.outcome, result.reward, result.turns, result.error) == ("finished", 1.0, 2, None)
    assert result.log == "said: It is done.\n"
    (trajectory,) = result.trajectories
    last = world.engine.requests[-1]["input_ids"]
    assert trajectory.tokens == last + world.encode(say("It is done."))
    assert "Mark it as done." in world.prompts()[0]
    assert "first line" in world.prompts()[1]
    assert result.mismatches == {}


async def test_nothing_but_the_gateway_can_be_reached(world: World, agent: Command) -> None:
    port = world.gateway.urls[0].rpartition(":")[2]
    probes = [
        f"curl -sS -m 3 http://127.0.0.1:{port}/health",
        "curl -sS -m 3 http://1.1.1.1",
        "curl -s -m 3 -o /dev/null -w '%{http_code}' http://127.0.0.1:8080/sessions",
        "curl -s -m 3 -o /dev/null -w '%{http_code}' -H \"Authorization: Bearer $OPENAI_API_KEY\" "
        "http://127.0.0.1:8080/sessions",
        "curl -s -m 3 -o /dev/null -w '%{http_code}' -X DELETE \"${OPENAI_BASE_URL%/v1}\"",
        "curl -s -m 3 http://127.0.0.1:8080/health",
        "touch /agent/x",
    ]
    world.script(call("; echo; ".join(probes)), say("done"))
    result = await world.run(task(), agent)
    assert result.outcome == "finished"
    seen = world.prompts()[1].rpartition("<|im_start|>tool\n")[2]
    assert seen.count("Failed to connect") == 2
    assert seen.splitlines().count("401") == 3
    assert '{"status":"ok"}' in seen
    assert "Read-only file system" in seen


@pytest.mark.parametrize(
    ("command", "outcome", "sentence"),
    [
        ("sh -c 'echo thinking; echo oh no >&2; exit 7'", "crashed", "status 7; its last words: oh no"),
        ("no-such-program", "crashed", "status 127"),
        ("sh -c 'kill -9 $$'", "crashed", "status 137"),
        ("sh -c 'setsid sleep 1000 & sleep 1000'", "timeout", "limit of 1 s"),
        ("sh -c 'trap \"\" TERM INT; while :; do :; done'", "timeout", "limit of 1 s"),
        ("true", "finished", ""),
    ],
)
async def test_how_a_program_ends(world: World, command: str, outcome: str, sentence: str) -> None:
    result = await world.run(task(agent_seconds=1.0), Command(command))
    assert result.outcome == outcome
    assert sentence in (result.error or "")
    assert (result.reward, result.trajectories) == (1.0, [])


async def test_a_program_that_floods_keeps_the_end_of_its_log(world: World) -> None:
    flood = "import sys; sys.stdout.write('x' * 5_000_000); print('the end')"
    result = await world.run(task(), Command(["python3", "-c", flood]))
    assert result.outcome == "finished"
    assert result.log.endswith("the end\n")
    assert len(result.log) < 20_000


async def test_a_log_that_cannot_be_read_to_its_end_is_left_alone(world: World) -> None:
    program = Command("sh -c 'rm /logs/agent/command.log; mkfifo /logs/agent/command.log; exit 3'")
    result = await world.run(task(), program)
    assert (result.outcome, result.log) == ("crashed", "")
    assert "status 3" in (result.error or "")


async def test_what_is_said_to_the_program(world: World) -> None:
    words = ["python3", "-c", "import os, sys; print(sys.argv[1:], os.environ['FURTHER'])"]
    words += ["--task={instruction}", "{base_url} {model}", "{other}", '{"a": "{instruction}"}']
    result = await world.run(
        task(instruction="Say '{model}'; $(rm -rf /)"), Command(words, env={"FURTHER": "more"})
    )
    assert "--task=Say '{model}'; $(rm -rf /)" in result.log
    assert "http://127.0.0.1:8080/sessions/" in result.log
    assert "/v1 titogym" in result.log
    assert "{other}" in result.log
    assert result.log.endswith("more\n")


@pytest.mark.parametrize(
    ("limits", "outcome", "sentence"),
    [
        ({"turns": 2}, "turn_limit", "budget of 2"),
        ({"tokens": 53}, "token_limit", "budget of 53"),
        ({"tokens": 40}, "token_limit", "limit of 40 tokens"),
        ({"turns": 500}, "context_limit", "maximum context length"),
    ],
)
async def test_the_gateway_keeps_the_limits_of_a_program(
    world: World, agent: Command, limits: dict[str, Any], outcome: str, sentence: str
) -> None:
    world.script(call("seq 600" if "500" in str(limits) else "true"))
    result = await world.run(task(**limits), agent)
    assert (result.outcome, result.reward) == (outcome, 1.0)
    assert sentence in (result.error or "")
    assert result.usable


async def test_an_engine_that_fails_is_told_from_a_program_that_crashes(world: World, agent: Command) -> None:
    world.script(call("touch done"), say("done"))
    world.engine.faults += [Fault("error", 0, 500)]
    result = await world.run(task(), agent)
    assert result.outcome == "engine_error"
    assert "The engine failed" in (result.error or "")


async def test_a_gateway_without_a_key_serves_no_program_inside(world: World, agent: Command) -> None:
    async with GatewayClient(world.gateway.urls) as unguarded:
        result = await run_episode(task(), harness=agent, backend=world.backend, gateway=unguarded)
    assert result.outcome == "setup_error"
    assert "--admin-key" in (result.error or "")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"command": ""}, "needs a command"),
        ({"command": "say 'it"}, "cannot be split"),
        ({"command": "x", "mount": {"/no/such/place": "/agent"}}, "/no/such/place"),
    ],
)
def test_a_command_that_cannot_be_run_is_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Command(**options)  # type: ignore[arg-type]


@given(st.text(alphabet="ab{}", max_size=20), st.text(alphabet="ab{}", max_size=5))
def test_filling_in_replaces_every_place_once(word: str, value: str) -> None:
    assert fill(word, {"{a}": value, "{b}": "B"}) == value.join(
        part.replace("{b}", "B") for part in word.split("{a}")
    )


@pytest.mark.parametrize("asked", [None, "linear"])
async def test_the_harness_says_what_its_sessions_bear_unless_it_is_asked_for(
    world: World, asked: Literal["linear"] | None
) -> None:
    for options in (
        attempting.session_options(asked, None, None, None),
        episodes.session_options(RunConfig.model_construct(**training_sections(asked)), 1.0),
    ):
        result = await world.run(task(), Command("true"), session_options=options, keep_session=True)
        assert result.session_id is not None
        (session,) = await world.gateway.sessions()
        assert session["policy"] == (asked or "branching")
        await world.gateway.delete(result.session_id)


def training_sections(policy: Literal["linear"] | None) -> dict[str, Any]:
    return {
        "gateway": GatewaySection(policy=policy),
        "rollout": RolloutSection(),
        "trainer": TrainerSection(),
    }


@pytest.mark.parametrize(
    ("network", "backend", "gateway", "needed"),
    [
        ("none", LocalBackend, "http://127.0.0.1:9000", True),
        ("open", LocalBackend, "http://127.0.0.1:9000", False),
        ("none", DockerBackend, "http://10.1.2.3:9000", True),
        ("open", DockerBackend, "http://127.0.0.1:9000", True),
        ("open", DockerBackend, "http://localhost:9000", True),
        ("open", DockerBackend, "http://10.1.2.3:9000", False),
        ("open", partial(DockerBackend, network="host"), "http://127.0.0.1:9000", False),
    ],
)
def test_a_program_gets_a_port_where_the_gateways_address_leads_nowhere(network, backend, gateway, needed):
    harness = Command("true")
    assert enclosed(harness, replace(task(), network=network), backend(), gateway) is needed
