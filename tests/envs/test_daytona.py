"""The daytona sandbox, through the unmodified SDK, against a loopback server that speaks its protocol."""

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("daytona", reason="NO DAYTONA: pip install -e '.[daytona]'")

from tests.doubles.daytona_server import DaytonaDouble, Fault
from titogym.envs.sandboxes import labels, owners
from titogym.envs.sandboxes.base import Build, SandboxError, SandboxSpec, Snapshot, Unsupported
from titogym.envs.sandboxes.creation import CreationPolicy
from titogym.envs.sandboxes.daytona import trust
from titogym.envs.sandboxes.daytona.backend import DaytonaBackend
from titogym.envs.sandboxes.destruction import Destruction
from titogym.envs.task import AllowList, GradingError, Limits, Task
from titogym.envs.terminal import TerminalEnvironment
from titogym.errors import UserError

pytestmark = [pytest.mark.sandbox, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

POLICY = CreationPolicy(rate=100, burst=100, attempts=4, pause=0.02, longest_pause=0.05)
SPEC = SandboxSpec(workdir="/app", env={"A": "1"}, labels={"episode": "7"})


@pytest.fixture(scope="module")
def double(sandboxes):
    double = DaytonaDouble(sandboxes)
    double.start()
    yield double
    double.stop()
    assert not os.listdir(sandboxes)


@pytest.fixture
async def backend(double, monkeypatch, request):
    """A backend; fails the test that leaves a sandbox behind.

    The double's sandboxes show this machine's /usr, which is far larger than an image's: one test lists it.
    """
    monkeypatch.setenv("DAYTONA_API_KEY", "key")
    if request.function is not test_honest_work_scores_1_and_nothing_scores_0:
        monkeypatch.setattr(trust, "LISTING", trust.LISTING.replace("find /usr /bin", "find /bin"))
    double.requests.clear()
    double.times.clear()
    backend = DaytonaBackend(api_url=double.url, target="us", policy=POLICY, labels={"run": "tests"})
    backend.destruction = Destruction((0.01, 0.02))
    yield backend
    double.faults.clear()
    await backend.close()
    assert not backend.undestroyed
    assert not double.remotes


@pytest.fixture
async def sandbox(backend):
    made = await backend.create(SPEC)
    yield made
    await made.destroy()


# --- what a sandbox does


async def test_commands(sandbox):
    done = await sandbox.exec('echo "$A $B"; echo oops >&2; pwd; exit 7', env={"B": "x y"})
    assert (done.exit_code, done.stdout, done.stderr) == (7, "1 x y\n/app\n", "oops\n")
    assert (await sandbox.exec(["printf", "%s|", "a b", "$A", "'"])).stdout == "a b|$A|'|"
    assert (await sandbox.exec("cat; echo -n é", stdin=b"\x00\xff in", cwd="/")).stdout == "\0� iné"
    assert (await sandbox.exec(["no-such-program"])).exit_code == 127
    assert (await sandbox.exec("kill -9 $$")).exit_code == 137
    assert (await sandbox.exec("echo 'a\0b'")).exit_code == 126
    assert not done.timed_out
    assert not done.out_of_memory


async def test_a_command_past_its_time_is_killed_with_its_tree(sandbox):
    started = time.monotonic()
    line = "echo begun; (setsid sleep 300 &); sh -c 'trap \"\" TERM; sleep 300' & sleep 300"
    done = await sandbox.exec(line, timeout=1)
    assert (done.exit_code, done.timed_out, done.stdout) == (124, True, "begun\n")
    assert time.monotonic() - started < 20
    assert "sleep 300" not in (await sandbox.exec("cat /proc/*/cmdline | tr '\\0' ' '")).stdout


async def test_what_a_command_leaves_running_is_counted_and_killed(sandbox):
    done = await sandbox.exec("sleep 300 & sleep 300 & echo done")
    assert (done.stdout, done.running) == ("done\n", 2)
    await sandbox.kill_processes()
    assert "sleep\x00300" not in (await sandbox.exec("cat /proc/*/cmdline")).stdout
    await sandbox.kill_processes()


async def test_output_is_capped_and_followed(sandbox):
    done = await sandbox.exec("head -c 3000000 /dev/zero | tr '\\0' x; echo y >&2", max_output=1_200_000)
    assert (len(done.stdout), done.stderr, done.truncated) == (1_200_000, "y\n", True)
    whole = await sandbox.exec("head -c 600000 /dev/zero | tr '\\0' x")
    assert (len(whole.stdout), whole.truncated) == (600_000, False)
    pieces = []
    await sandbox.exec("echo a; sleep 1.5; echo b >&2", on_output=lambda *piece: pieces.append(piece))
    assert pieces == [("stdout", b"a\n"), ("stderr", b"b\n")]


async def test_the_agents_programs_do_not_stand_in_for_ours(backend):
    sandbox = await backend.create(replace(SPEC, env={"PATH": "/app/bin:/usr/bin:/bin"}))
    try:
        await sandbox.upload(
            dict.fromkeys(("base64", "head", "env", "rm"), "#!/bin/sh\necho fake\n"), "/app/bin"
        )
        await sandbox.exec("chmod +x bin/*")
        done = await sandbox.exec("head -c 3; echo $PATH", stdin=b"abc")
        assert done.stdout == "fake\n/app/bin:/usr/bin:/bin\n"  # the agent's commands do find them
        assert await sandbox.read("/app/bin/rm", 9) == b"#!/bin/sh"
    finally:
        await sandbox.destroy()


async def test_files(sandbox, tmp_path):
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "a.bin").write_bytes(bytes(range(256)))
    (tmp_path / "tree" / "run.sh").write_text("echo ran")
    (tmp_path / "tree" / "run.sh").chmod(0o755)
    await sandbox.upload(tmp_path / "tree", "/app/data")
    await sandbox.upload({"x/y.txt": "é"}, "/app")
    assert (await sandbox.exec("sh data/run.sh; cat x/y.txt")).stdout == "ran\né"
    await sandbox.download("/app/data", tmp_path / "back")
    assert (tmp_path / "back" / "sub" / "a.bin").read_bytes() == bytes(range(256))
    assert await sandbox.read("/app/data/sub/a.bin", 3) == b"\0\1\2"
    await sandbox.exec("ln -s /etc/hosts link; ln -s /etc dir; mkdir empty")
    for path in ("/app/link", "/app/dir/hosts", "/app/empty", "/app/none", "/app/x/y.txt/z"):
        assert await sandbox.read(path, 100) is None, path
    with pytest.raises(SandboxError, match="fetch /nowhere"):
        await sandbox.download("/nowhere", tmp_path / "no")


async def test_snapshots(backend, sandbox, double):
    await sandbox.exec("echo kept > file")
    snapshot = await sandbox.snapshot()
    again = await backend.create(replace(SPEC, image=snapshot))
    assert (await again.exec("cat file")).stdout == "kept\n"
    await again.destroy()
    await backend.delete_snapshot(snapshot)
    await backend.delete_snapshot(snapshot)
    assert not double.snapshots
    with pytest.raises(Unsupported):
        await backend.delete_snapshot(Snapshot("local", "x"))


async def test_a_cancelled_command_is_killed(sandbox):
    running = asyncio.create_task(sandbox.exec("sleep 299"))
    await asyncio.sleep(0.5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert "sleep\x00299" not in (await sandbox.exec("cat /proc/*/cmdline")).stdout


# --- what is asked for at creation


async def test_the_request_bears_labels_limits_and_the_whole_lifetime(backend, double):
    task = Task("t", "x", limits=Limits(agent_seconds=7200, verifier_seconds=900, memory_mb=1500, cpus=1.5))
    task = replace(task, image="debian:12")
    sandbox = await backend.create(SandboxSpec.for_task(task, {"episode": "7"}))
    await sandbox.destroy()
    (body,) = double.bodies("POST", "/api/sandbox")
    assert body["buildInfo"]["dockerfileContent"].split() == ["FROM", "debian:12"]
    assert (body["cpu"], body["memory"], body["disk"]) == (2, 2, 2)
    minutes = (7200 + 900) / 60
    assert body["autoStopInterval"] > minutes + 30  # with set-up and grading, not at the agent's limit
    assert body["ttlMinutes"] >= body["autoStopInterval"]
    assert body["autoDeleteInterval"] == 0
    assert body["networkBlockAll"] is True
    marks = body["labels"]
    assert (marks["titogym.run"], marks["titogym.episode"], marks["titogym.task"]) == ("tests", "7", "t")
    assert marks[labels.ID] == sandbox.id
    assert owners.parse(marks[labels.OWNER]) == owners.me()


@pytest.mark.parametrize(
    ("network", "asked"),
    [
        ("open", {"networkBlockAll": False}),
        (AllowList(("pypi.org", "*.x.org", "10.0.0.0/8")), {"domainAllowList": "pypi.org,*.x.org"}),
        (AllowList(("10.0.0.0/8", "1.2.3.4")), {"networkAllowList": "10.0.0.0/8,1.2.3.4/32"}),
        (AllowList(()), {"networkBlockAll": True}),
    ],
)
async def test_networks(backend, double, network, asked):
    await (await backend.create(replace(SPEC, network=network))).destroy()
    (body,) = double.bodies("POST", "/api/sandbox")
    assert asked.items() <= body.items()


async def test_what_cannot_be_had_is_refused_before_anything_is_made(backend, double, tmp_path):
    for spec, said in [
        (replace(SPEC, services={80: "127.0.0.1:1"}), "cannot reach services"),
        (replace(SPEC, network=AllowList(("x.org:8080",))), "without ports"),
        (replace(SPEC, image=Snapshot("local", "x")), "not a snapshot of Daytona"),
        (replace(SPEC, image=Build(tmp_path)), "does not exist"),
    ]:
        with pytest.raises(UserError, match=said):
            await backend.create(spec)
    assert not double.bodies("POST", "/api/sandbox")


async def test_a_dockerfile_is_built_there(backend, double, tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM debian:12\nRUN echo hello\nWORKDIR /app\n")
    await (await backend.create(replace(SPEC, image=Build(tmp_path)))).destroy()
    (body,) = double.bodies("POST", "/api/sandbox")
    assert body["buildInfo"]["dockerfileContent"] == (tmp_path / "Dockerfile").read_text()
    (tmp_path / "Dockerfile").write_text("FROM debian:12\nRUN false\n")
    with pytest.raises(SandboxError, match="RUN false"):
        await backend.create(replace(SPEC, image=Build(tmp_path)))


async def test_without_a_key_it_says_so(monkeypatch, double, tmp_path):
    monkeypatch.delenv("DAYTONA_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="set DAYTONA_API_KEY"):
        await DaytonaBackend(api_url=double.url).create(SPEC)


# --- faults


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_refused_creation_is_tried_again(backend, double, status):
    double.faults.append(Fault("POST", "/api/sandbox$", status, times=2))
    await (await backend.create(SPEC)).destroy()
    assert len(double.bodies("POST", "/api/sandbox")) == 3


async def test_the_service_says_when_to_come_again(backend, double):
    double.faults.append(Fault("POST", "/api/sandbox$", 429, headers={"Retry-After": "0.6"}))
    await (await backend.create(SPEC)).destroy()
    first, second = double.times
    assert 0.6 <= second - first < 5


async def test_it_gives_up_at_last_and_says_why(backend, double):
    double.faults.append(Fault("POST", "/api/sandbox$", 503, times=99))
    with pytest.raises(SandboxError, match=r"could not create a sandbox \(status 503\)"):
        await backend.create(SPEC)
    assert len(double.bodies("POST", "/api/sandbox")) == POLICY.attempts


@pytest.mark.parametrize("status", [400, 422])
async def test_what_will_not_pass_is_not_tried_again(backend, double, status):
    double.faults.append(Fault("POST", "/api/sandbox$", status))
    with pytest.raises(SandboxError, match=f"status {status}"):
        await backend.create(SPEC)
    assert len(double.bodies("POST", "/api/sandbox")) == 1


async def test_a_key_that_is_refused_is_the_users_matter(backend, double):
    double.faults.append(Fault("POST", "/api/sandbox$", 401))
    with pytest.raises(UserError, match="DAYTONA_API_KEY"):
        await backend.create(SPEC)


async def test_a_sandbox_whose_creation_was_not_answered_is_deleted(backend, double):
    double.faults.append(Fault("POST", "/api/sandbox$", 504, lost=True))
    sandbox = await backend.create(SPEC)
    assert len(double.remotes) == 1  # the first try's has gone
    await sandbox.destroy()


@pytest.mark.parametrize("status", [401, 403, 429])
async def test_a_sandbox_that_could_not_be_prepared_is_deleted(backend, double, status):
    double.faults.append(Fault("POST", "/process/execute$", status, times=POLICY.attempts))
    with pytest.raises((SandboxError, UserError)):
        await backend.create(SPEC)
    assert double.bodies("POST", "/api/sandbox")
    assert not double.remotes


async def test_a_snapshot_whose_answer_was_lost_is_deleted(backend, double, sandbox):
    double.faults.append(Fault("POST", "/snapshot$", 400, lost=True))
    with pytest.raises(SandboxError, match="keep the file system"):
        await sandbox.snapshot()
    assert not double.snapshots


async def test_a_sandbox_that_never_starts_is_deleted(backend, double, monkeypatch):
    monkeypatch.setattr("titogym.envs.sandboxes.daytona.backend._START_SECONDS", 5.0)
    double.faults.append(Fault("GET", "/api/sandbox/[^/]+$", seconds=8))
    await (await backend.create(SPEC)).destroy()
    assert len(double.bodies("POST", "/api/sandbox")) == 2
    assert len(double.bodies("DELETE", "/api/sandbox/[^/]+")) == 2


async def test_a_cancelled_creation_leaves_nothing(backend, double):
    double.faults.append(Fault("GET", "/api/sandbox/[^/]+$", seconds=30))
    creating = asyncio.create_task(backend.create(SPEC))
    for _ in range(400):  # until the server has made it
        await asyncio.sleep(0.05)
        if double.remotes:
            break
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert not double.remotes


async def test_a_creation_that_is_cancelled_before_its_answer_leaves_nothing(backend, double):
    double.faults.append(Fault("POST", "/api/sandbox$", seconds=0.3))  # and carried out all the same
    creating = asyncio.create_task(backend.create(SPEC))
    for _ in range(1000):
        await asyncio.sleep(0.02)
        if double.times:
            break
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert not double.remotes


async def test_lost_answers_neither_repeat_a_command_nor_lose_its_output(sandbox, double):
    double.faults += [
        Fault("POST", "process/execute", 502, lost=True),
        Fault("POST", "process/execute", 500),
        Fault("POST", "process/execute", 429, headers={"Retry-After": "0"}),
    ]
    done = await sandbox.exec("echo x >> n; wc -l < n; exit 3")
    assert (done.exit_code, done.stdout.strip()) == (3, "1")
    double.faults += [Fault("POST", "bulk-upload", 503), Fault("POST", "process/execute", 504, lost=True)]
    await sandbox.upload({"f": "content"}, "/app")
    assert await sandbox.read("/app/f", 99) == b"content"


async def test_destroying_is_tried_again_and_failure_is_told(backend, double):
    sandbox = await backend.create(SPEC)
    double.faults.append(Fault("DELETE", "/api/sandbox/", 500, times=2))
    await sandbox.destroy()
    assert not double.remotes
    sandbox = await backend.create(SPEC)
    double.faults.append(Fault("DELETE", "/api/sandbox/", 500, times=99))
    with pytest.raises(SandboxError, match="could not be destroyed"):
        await sandbox.destroy()
    assert list(backend.undestroyed) == [sandbox.id]
    double.faults.clear()
    await backend.close()  # tries once more
    assert not backend.undestroyed
    assert not double.remotes


async def test_deleting_what_has_gone_is_no_failure(backend, double):
    sandbox = await backend.create(SPEC)
    remote = double.remotes.pop(next(iter(double.remotes)))
    await sandbox.destroy()
    double.remotes[remote.about["id"]] = remote  # its local part is the fixture's to check
    with pytest.raises(SandboxError, match="destroyed"):
        await sandbox.exec("true")
    await (await backend.service.client.get(remote.about["id"])).delete()


async def test_the_reaper_deletes_what_dead_drivers_left(backend, double):
    specs = [replace(SPEC, lifetime=lifetime) for lifetime in (3600, 3600, 3600, -5)]
    sandboxes = [await backend.create(spec) for spec in specs]
    by_id = {remote.about["labels"][labels.ID]: remote.about["labels"] for remote in double.remotes.values()}
    dead, elsewhere, overdue = (by_id[sandbox.id] for sandbox in sandboxes[1:])
    me = owners.me()
    dead[labels.OWNER] = str(replace(me, started=me.started - 1))
    elsewhere[labels.OWNER] = overdue[labels.OWNER] = str(replace(me, boot="another machine"))
    foreign = await backend.create(SPEC)
    by_id = {remote.about["labels"][labels.ID]: remote.about["labels"] for remote in double.remotes.values()}
    by_id[foreign.id].clear()  # somebody else's, without our labels
    double.faults.append(Fault("DELETE", "/api/sandbox/", 500))
    reaped = await backend.reap()
    assert len(reaped.destroyed) + len(reaped.failed) == 2
    assert len(reaped.failed) == 1
    reaped = await backend.reap()
    assert set(reaped.destroyed) <= {sandboxes[1].id, sandboxes[3].id}
    assert len(double.remotes) == 3
    for sandbox in (sandboxes[0], sandboxes[2], foreign):
        await sandbox.destroy()


KILLS = int(os.environ.get("TITOGYM_TEST_DAYTONA_KILLS", "3"))


async def test_drivers_that_are_killed_at_random_leave_nothing_after_the_next_pass(backend, double):
    program = Path(__file__).with_name("daytona_drivers.py")
    drivers = await asyncio.create_subprocess_exec(
        *[sys.executable, str(program), double.url, str(KILLS), "4"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert await drivers.wait() == 0
    seen = len(double.requests)
    while True:  # until the server has done what it was asked for last
        await asyncio.sleep(1)
        if len(double.requests) == seen:
            break
        seen = len(double.requests)
    assert double.remotes
    reaped = await backend.reap()
    assert not reaped.failed
    assert not double.remotes


# --- grading

TASK = Task(
    "answer",
    "Write the answer to /app/answer.txt.",
    tests={
        "test.sh": "#!/bin/sh\n"
        '[ "$(cat answer.txt)" = 42 ] && reward=1 || reward=0\necho $reward > /logs/verifier/reward.txt\n'
    },
    workdir="/app",
    env={"FROM_TASK": "x"},
)
PROGRAM = replace(
    TASK,
    tests={
        "test.sh": '#!/bin/sh\n[ "$(timeout 2 /app/program)" = 42 ] && r=1 || r=0\nsleep 0.2\n'
        "echo $r > /logs/verifier/reward.txt\n"
    },
)


async def attempt(backend, task, command):
    sandbox = await backend.create(SandboxSpec.for_task(task))
    try:
        environment = TerminalEnvironment()
        await environment.reset(task, sandbox)
        await sandbox.exec(command, timeout=10)
        await sandbox.kill_processes()
        return await environment.grade(task, sandbox)
    finally:
        await sandbox.destroy()


async def test_honest_work_scores_1_and_nothing_scores_0(backend):
    grade = await attempt(backend, TASK, "echo 42 > answer.txt; [ $FROM_TASK = x ] || rm answer.txt")
    assert grade.reward == 1
    assert grade.evidence["remarks"] == []
    assert grade.evidence["touched"] == []
    assert (await attempt(backend, TASK, "ls /tests || true")).reward == 0


DAEMON = "sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' >/dev/null 2>&1 &"
CHEATS = {
    "writes the reward": (TASK, "echo 1 > /logs/verifier/reward.txt"),
    "leaves a daemon that looks like ours": (
        TASK,
        f"TITOGYM_COMMAND=main setsid {DAEMON}",
    ),
    "its program writes the reward": (PROGRAM, "echo 1 > /logs/verifier/reward.txt"),
    "its program kills the tests": (PROGRAM, "echo 1 > /logs/verifier/reward.txt; kill -9 -1"),
    "its program says the tests have ended": (
        PROGRAM,
        "echo 1 > /logs/verifier/reward.txt; for d in /tmp/.titogym-*;"
        " do echo x 0 0 0 > $d/end; done; sleep 1",
    ),
    "its program takes the supervisor away": (
        PROGRAM,
        "echo 1 > /logs/verifier/reward.txt; for d in /tmp/.titogym-*; do kill -9 $(cat $d/pid);"
        " echo x 0 0 0 > $d/end; done; sleep 1",
    ),
}


@pytest.mark.parametrize("cheat", CHEATS)
async def test_cheating_does_not_pay(backend, cheat):
    task, command = CHEATS[cheat]
    if task is PROGRAM:
        command = f"cat > program <<'END'\n#!/bin/sh\n{command}\nEND\nchmod +x program"
    try:
        grade = await attempt(backend, task, command)
    except (GradingError, SandboxError):
        return
    assert grade.reward == 0


async def test_an_agent_that_replaced_the_shell_is_not_graded(backend):
    with pytest.raises(SandboxError, match="replaced /bin/sh"):
        await attempt(
            backend,
            TASK,
            "mkdir /home/b; cp -L /usr/bin/sh /usr/bin/bash /home/b; echo >> /home/b/sh; rm /bin;"
            " ln -s /home/b /bin",
        )


async def test_what_the_agent_changed_in_the_system_is_remarked(backend):
    grade = await attempt(backend, TASK, "echo 42 > answer.txt; echo x >> /etc/hosts")
    assert grade.evidence["remarks"] == ["files of the system were changed: /etc/hosts"]


def test_the_base_install_does_without_the_package():
    """Nothing of the SDK is loaded before a sandbox is asked for."""
    line = "import sys, titogym.envs.sandboxes.daytona.backend as b; b.DaytonaBackend()"
    line += "; assert 'daytona' not in sys.modules"
    subprocess.run([sys.executable, "-c", line], check=True, cwd=Path(__file__).parents[2])
