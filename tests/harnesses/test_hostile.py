"""Programs that die, hang, flood, fork or hammer: each still gives what it sampled, and a verdict.

No limit is trusted to them, and nothing is to be reached from where they run but the gateway.
"""

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harnesses.world import PASS_IF_DONE, World, call, task
from titogym.harnesses import episode
from titogym.harnesses.command import Command

pytestmark = pytest.mark.sandbox

PROGRAM = '''
"""One honest turn, whose command is carried out; then the habit in argv[1]."""
import json, os, signal, socket, subprocess, sys, threading, time, urllib.request

TOOL = {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}

def ask(text="Do it."):
    body = {"model": "m", "messages": [{"role": "user", "content": text}],
            "tools": [{"type": "function", "function": TOOL}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]

def fork_bomb():
    while True:
        try:
            os.fork()
        except OSError:
            time.sleep(0.05)

def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                try:
                    os.remove("/workspace/done")
                except OSError:
                    pass
                open("/logs/verifier/reward.txt", "w").write("0.5")
        os._exit(0)
    time.sleep(0.3)
    open("/workspace/done", "w")

def flood():
    while True:
        os.write(1, b"x" * 65536)
        os.write(2, b"y" * 65536)

def flood_disk():
    with open("/workspace/big", "wb") as file:
        while True:
            file.write(bytes(1 << 20))

def memory():
    held = []
    while True:
        held.append(bytearray(64 << 20))

def hammer():
    for number in range(10 ** 9):
        try:
            ask(f"Do it, {number}.")
        except OSError:
            pass

def hang():
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    while True:
        time.sleep(1)

def hold():
    """Connections that never say anything."""
    held = [socket.create_connection(("127.0.0.1", 8080)) for _ in range(100)]
    time.sleep(3600)

def die():
    os.kill(os.getpid(), signal.SIGSEGV)

message = ask()
command = json.loads(message["tool_calls"][0]["function"]["arguments"])["command"]
subprocess.run(["sh", "-c", command])
globals()[sys.argv[1]]()
'''


@pytest.fixture(scope="module")
def program() -> Iterator[str]:
    home = Path(tempfile.mkdtemp(prefix="titogym-hostile-"))
    home.chmod(0o755)
    (home / "program.py").write_text(PROGRAM)
    yield str(home)
    shutil.rmtree(home)


def habit(program: str, name: str) -> Command:
    return Command(["python3", "/agent/program.py", name], mount={program: "/agent"})


@pytest.mark.parametrize(
    ("name", "outcomes"),
    [
        ("die", {"crashed"}),
        ("hang", {"timeout"}),
        ("hold", {"timeout"}),
        ("flood", {"timeout", "crashed"}),  # its log may be cut by a limit of the file's size
        ("flood_disk", {"timeout", "crashed"}),
        ("memory", {"crashed", "timeout"}),
        ("fork_bomb", {"timeout", "crashed"}),
    ],
)
async def test_whatever_it_does_its_turn_is_kept_and_judged(
    world: World, program: str, name: str, outcomes: set[str]
) -> None:
    world.script(call("touch /workspace/done"))
    limits: dict[str, Any] = {"agent_seconds": 6.0, "memory_mb": 256, "storage_mb": 64, "processes": 64}
    result = await world.run(task(PASS_IF_DONE, **limits), habit(program, name))
    assert result.outcome in outcomes, result.error
    assert (result.turns, len(result.trajectories)) == (1, 1)
    assert sum(result.trajectories[0].loss_mask) == len(world.encode(call("touch /workspace/done")))
    assert result.reward == 1.0 or (name, result.outcome) == ("flood_disk", "crashed"), result.error
    assert len(result.log) < 20_000
    assert result.seconds["agent"] < 60


async def test_a_daemon_that_it_leaves_behind_does_not_see_the_grading(world: World, program: str) -> None:
    world.script(call("touch /workspace/done"))
    check = f"rm -f /workspace/done; touch /workspace/done; sleep 0.5; {PASS_IF_DONE}"
    result = await world.run(task(check), habit(program, "daemon"))
    assert (result.outcome, result.reward, result.turns) == ("finished", 1.0, 1)


async def test_one_that_goes_on_asking_is_stopped_when_its_budget_is_used_up(
    world: World, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode, "BUDGET_CHECK", 0.3)
    world.script(call("touch /workspace/done"))
    result = await world.run(task(PASS_IF_DONE, agent_seconds=120.0, turns=3), habit(program, "hammer"))
    assert (result.outcome, result.reward, result.turns) == ("turn_limit", 1.0, 3)
    assert result.seconds["agent"] < 60
    assert len(world.engine.requests) == 3


async def test_no_service_of_this_machine_can_be_reached(world: World) -> None:
    """Not on its loopback, not on its other addresses, not by abstract sockets; no name is resolved."""
    heard: list[str] = []

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append("connected")
        writer.close()

    server = await asyncio.start_server(served, "0.0.0.0", 0)
    port = server.sockets[0].getsockname()[1]
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0titogym-test-{port}")
    abstract.listen()
    probe = f"""
import socket
def tell(what, work):
    try:
        work()
    except OSError:
        print(what, "refused")
    else:
        print(what, "REACHED")
def tcp(host, port):
    return lambda: socket.create_connection((host, port), 2)
def unix():
    socket.socket(socket.AF_UNIX).connect("\\0titogym-test-{port}")
tell("loopback", tcp("127.0.0.1", {port}))
tell("host", tcp({_own_address()!r}, {port}))
tell("outside", tcp("192.0.2.1", 80))
tell("v6", tcp("::1", {port}))
tell("abstract", unix)
tell("name", lambda: socket.getaddrinfo("example.org", 80))
tell("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
tell("gateway", tcp("127.0.0.1", 8080))
"""
    try:
        result = await world.run(task(), Command(["python3", "-c", probe]))
    finally:
        server.close()
        abstract.close()
    told = dict(line.split() for line in result.log.splitlines())
    assert told.pop("gateway") == "REACHED"
    assert set(told.values()) == {"refused"}, result.log
    assert len(told) == 7
    assert heard == []


def _own_address() -> str:
    """An address of this machine that is not its loopback, where it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.2"
        return str(probe.getsockname()[0])
