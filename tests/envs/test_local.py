"""The local sandbox: what commands can do, what they cannot, and what remains of them."""

import asyncio
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from titogym.envs.sandboxes import bubblewrap, local, storage
from titogym.envs.sandboxes.base import Mount, SandboxError, SandboxSpec
from titogym.envs.sandboxes.local import LocalBackend
from titogym.envs.task import Limits
from titogym.errors import UserError

pytestmark = pytest.mark.sandbox

SMALL = Limits(memory_mb=128, storage_mb=64, processes=40)


@pytest.fixture
async def sandbox(backend):
    made = await backend.create(SandboxSpec(limits=SMALL, env={"COLOUR": "blue"}))
    yield made
    await made.destroy()


# --- commands


async def test_output_and_exit_code(sandbox):
    done = await sandbox.exec("echo out; echo err >&2; exit 7")
    assert (done.exit_code, done.stdout, done.stderr) == (7, "out\n", "err\n")
    assert (done.timed_out, done.out_of_memory, done.truncated) == (False, False, False)


async def test_arguments_are_not_a_shell_line(sandbox):
    done = await sandbox.exec(["printf", "%s|", "a b", "$HOME", "*"])
    assert done.stdout == "a b|$HOME|*|"


async def test_directory_environment_and_input(sandbox):
    done = await sandbox.exec(
        'pwd; echo "$COLOUR $SIZE $HOME"; cat', env={"SIZE": "9"}, stdin=b"\xe2\x82\xac"
    )
    assert done.stdout == "/workspace\nblue 9 /root\n€"
    assert (await sandbox.exec("pwd", cwd="/tmp")).stdout == "/tmp\n"
    assert (await sandbox.exec("env")).stdout.count("\n") < 10, "the driver's environment leaks"


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (["no-such-program"], 127, "No such file"),
        (["/etc/hosts"], 126, "Permission denied"),
        ("x" * 200_000, 126, "Argument list too long"),
        ("nul\0", 126, "NUL"),
        ("lone surrogate \ud800", 126, "surrogates"),
    ],
)
async def test_what_cannot_run_is_a_result(sandbox, command, code, message):
    done = await sandbox.exec(command)
    assert done.exit_code == code
    assert message in done.stderr


async def test_a_missing_directory_is_a_result(sandbox):
    done = await sandbox.exec("pwd", cwd="/nowhere")
    assert done.exit_code == 126
    assert "/nowhere" in done.stderr


async def test_bytes_that_are_no_text_are_replaced(sandbox):
    assert (await sandbox.exec(r"printf 'a\377b'")).stdout == "a\ufffdb"


async def test_killed_by_a_signal(sandbox):
    done = await sandbox.exec("kill -9 $$")
    assert (done.exit_code, done.out_of_memory, done.timed_out) == (137, False, False)
    assert (await sandbox.exec("kill -TERM $$")).exit_code == 143


async def test_output_beyond_the_cap_is_dropped_and_the_command_ends(sandbox):
    done = await sandbox.exec("head -c 3000000 /dev/zero; echo end >&2", max_output=1000)
    assert (len(done.stdout), done.stderr, done.truncated, done.exit_code) == (1000, "end\n", True, 0)
    exact = await sandbox.exec("printf %1000s", max_output=1000)
    assert (len(exact.stdout), exact.truncated) == (1000, False)


async def test_an_endless_flood_costs_the_driver_little(sandbox):
    before = time.process_time()
    done = await sandbox.exec("yes", timeout=1)
    assert (done.exit_code, done.timed_out, done.truncated) == (124, True, True)
    assert time.process_time() - before < 0.5


async def test_commands_run_side_by_side(sandbox):
    started = time.monotonic()
    results = await asyncio.gather(*(sandbox.exec(f"sleep 0.4; echo {number}") for number in range(8)))
    assert [done.stdout for done in results] == [f"{number}\n" for number in range(8)]
    assert time.monotonic() - started < 2


async def test_many_commands_cost_the_driver_little(sandbox):
    before = time.process_time()
    for _ in range(100):
        await sandbox.exec("true")
    assert (time.process_time() - before) / 100 < 0.003


# --- ends


async def test_timeout_kills_the_whole_tree_and_nothing_else(sandbox):
    await sandbox.exec("sleep 77 >/dev/null 2>&1 &")
    started = time.monotonic()
    done = await sandbox.exec(
        "setsid sh -c 'setsid sleep 88 & sleep 88' & (setsid sleep 88 &); trap '' TERM; sleep 88", timeout=0.5
    )
    assert time.monotonic() - started < 3
    assert (done.exit_code, done.timed_out, done.stdout) == (124, True, "")
    assert await running(sandbox) == ["sleep 77"]


async def test_output_before_the_timeout_is_kept(sandbox):
    assert (await sandbox.exec("echo early; sleep 60", timeout=0.5)).stdout == "early\n"


async def test_a_cancelled_command_is_killed(sandbox):
    command = asyncio.create_task(sandbox.exec("sleep 88"))
    await asyncio.sleep(0.2)
    command.cancel()
    with pytest.raises(asyncio.CancelledError):
        await command
    await eventually(lambda: running(sandbox), [])


async def test_background_processes_outlast_their_command(sandbox):
    started = time.monotonic()
    done = await sandbox.exec("(sleep 1; echo late; touch /tmp/late) & echo now")
    assert done.stdout == "now\n"
    assert done.running in (1, 2)  # its `sleep` may not have begun
    assert time.monotonic() - started < 0.9, "the command was held up by its background process"
    await asyncio.sleep(1.3)
    assert (await sandbox.exec("ls /tmp")).stdout == "late\n"
    assert (await sandbox.exec("true")).running == 0


async def test_kill_processes_keeps_the_files(sandbox):
    await sandbox.exec("echo kept > /tmp/file; setsid sleep 88 >/dev/null 2>&1 &")
    await sandbox.kill_processes()
    await sandbox.kill_processes()
    assert await sandbox.read("/tmp/file", 100) == b"kept\n"
    assert (await sandbox.exec("cat /tmp/file")).stdout == "kept\n"
    assert await running(sandbox) == []


async def test_destroy_ends_running_commands_and_may_be_repeated(backend):
    sandbox = await backend.create(SandboxSpec())
    command = asyncio.create_task(sandbox.exec("sleep 88"))
    await asyncio.sleep(0.1)
    await sandbox.destroy()
    with pytest.raises(SandboxError):
        await command
    await sandbox.destroy()
    with pytest.raises(SandboxError, match="destroyed"):
        await sandbox.exec("true")
    with pytest.raises(SandboxError, match="destroyed"):
        await sandbox.successor(read_only={}, env={})


async def test_an_agent_that_attacks_process_1_harms_only_itself(sandbox):
    attacks = (
        "kill -9 1; kill -STOP 1; kill -TERM 1; cat /proc/1/environ; echo x > /proc/1/mem; ls /proc/1/fd"
    )
    await sandbox.exec(attacks)
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"
    await sandbox.exec("kill -9 -1")
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"


async def test_no_descriptor_of_the_driver_reaches_a_command(sandbox):
    assert (await sandbox.exec("ls /proc/self/fd")).stdout.split() == ["0", "1", "2", "3"]


async def test_nothing_is_left_in_the_driver(backend):
    async def cycle():
        sandbox = await backend.create(SandboxSpec(limits=SMALL))
        await sandbox.exec("sleep 60 & echo hi")
        await sandbox.exec("sleep 60", timeout=0.05)
        await sandbox.destroy()

    await cycle()
    descriptors, children = len(os.listdir("/proc/self/fd")), own_children()
    await asyncio.gather(*(cycle() for _ in range(6)))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert own_children() == children


# --- walls


async def test_the_system_is_read_only_and_all_else_is_private(sandbox):
    done = await sandbox.exec(
        "for d in /usr /usr/bin /bin /lib /dev /proc/sys/kernel; do touch $d/x && echo $d; done"
    )
    assert done.stdout == ""
    paths = "/ /app /srv/x /opt /root /home /etc /var/tmp /logs /solution /tests /tmp /mnt /run"
    done = await sandbox.exec(f"for d in {paths}; do mkdir -p $d && touch $d/mine || exit 1; done")
    assert done.exit_code == 0, done.stderr
    assert "mine" not in os.listdir("/etc")
    assert "mine" not in os.listdir("/")


async def test_nothing_of_the_host_shows(sandbox, tmp_path):
    (tmp_path / "secret").write_text("secret")
    done = await sandbox.exec(
        f"cat {tmp_path}/secret /etc/shadow /root/* /home/*; ls {Path(__file__).parent}; hostname"
    )
    assert "secret" not in done.stdout
    assert done.stdout == "sandbox\n"
    pids = [int(name) for name in (await sandbox.exec("ls /proc")).stdout.split() if name.isdigit()]
    assert max(pids) < 100, "it sees processes of the host"


async def test_it_is_root_without_power(sandbox):
    done = await sandbox.exec(
        "id -u; chmod 000 /tmp; touch /tmp/x && echo as root; unshare -U true; mount -t tmpfs x /mnt"
    )
    assert done.stdout == "0\nas root\n"
    assert done.exit_code != 0
    assert "unshare" in done.stderr


async def test_on_the_host_it_is_nobody(sandbox):
    if os.geteuid() != 0:
        pytest.skip("only root can give sandboxes users of their own")
    await sandbox.exec("touch /tmp/mine")
    assert (sandbox._root / "tmp" / "mine").stat().st_uid >= local._FIRST_USER


async def test_no_network_not_even_to_this_machine(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = await sandbox.exec(f"exec 3<>/dev/tcp/127.0.0.1/{port}")
    assert done.exit_code != 0
    interfaces = await sandbox.exec("tail -n +3 /proc/net/dev | cut -d: -f1")
    assert interfaces.stdout.split() == ["lo"]


async def test_memory_is_limited(sandbox):
    done = await sandbox.exec("python3 -c 'x = bytearray(400 << 20)'; echo $?")
    assert done.stdout != "0\n"
    if sandbox._group is not None and sandbox._group.limits_memory:
        done = await sandbox.exec("python3 -c 'x = bytearray(400 << 20)'")
        assert (done.exit_code, done.out_of_memory, done.timed_out) == (137, True, False)
        assert not (await sandbox.exec("exit 1")).out_of_memory
        each = "python3 -c 'import time; x = bytearray(50 << 20); time.sleep(2)'"
        assert (await sandbox.exec(f"{each} & {each} & {each} & wait; exit 1")).out_of_memory


async def test_processes_are_limited_and_a_fork_bomb_dies_at_its_timeout(sandbox):
    started = time.monotonic()
    done = await sandbox.exec(":(){ :|:& };:; sleep 60", timeout=1)
    assert done.timed_out
    assert time.monotonic() - started < 5
    await sandbox.kill_processes()
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"


async def test_file_size_is_limited(sandbox):
    done = await sandbox.exec("head -c 100M /dev/zero > big; wc -c < big")
    assert int(done.stdout) == 64 << 20


async def test_shared_memory_is_limited(sandbox):
    done = await sandbox.exec("head -c 300M /dev/zero > /dev/shm/big; du -m /dev/shm/big | cut -f1")
    assert int(done.stdout or 0) <= 128


async def test_a_sandbox_that_fills_its_disk_is_stopped(backend):
    sandbox = await backend.create(SandboxSpec(limits=SMALL))
    try:
        with pytest.raises(SandboxError, match="more than its 64 MiB"):
            await sandbox.exec("for i in 1 2 3 4; do head -c 50M /dev/zero > $i; done; sleep 20")
        with pytest.raises(SandboxError, match="more than its 64 MiB"):
            await sandbox.exec("true")
    finally:
        await sandbox.destroy()


# --- files


async def test_trees_go_in_and_come_out(sandbox, tmp_path):
    source = tmp_path / "source"
    (source / "inner" / "empty").mkdir(parents=True)
    (source / "inner" / "naïve file").write_bytes(bytes(range(256)))
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("run.sh")
    await sandbox.upload(source, "/data/tree")
    await sandbox.upload({"a/b.txt": "text €"}, "/data/tree")
    await sandbox.upload(source / "run.sh", "/data/single")
    done = await sandbox.exec(
        "/data/tree/link && /data/single && cat /data/tree/a/b.txt && stat -c %U /data/tree/run.sh"
    )
    assert done.stdout == "ran\nran\ntext €root\n"
    await sandbox.download("/data/tree", tmp_path / "back")
    assert (tmp_path / "back" / "inner" / "naïve file").read_bytes() == bytes(range(256))
    assert (tmp_path / "back" / "a" / "b.txt").read_text() == "text €"
    await sandbox.download("/data/single", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "#!/bin/sh\necho ran\n"


async def test_what_cannot_be_fetched_is_an_error(sandbox, tmp_path):
    with pytest.raises(SandboxError, match="/nothing"):
        await sandbox.download("/nothing", tmp_path / "x")
    await sandbox.exec("ln -s /etc/passwd /tmp/link; mkdir /tmp/d; ln -s /etc /tmp/d/out")
    with pytest.raises(SandboxError, match="link"):
        await sandbox.download("/tmp/link", tmp_path / "x")
    with pytest.raises(SandboxError, match="out"):
        await sandbox.download("/tmp/d", tmp_path / "x")
    assert os.listdir(tmp_path) == []


async def test_trees_that_hold_more_than_files_are_refused(backend, tmp_path):
    (tmp_path / "tests").mkdir()
    os.mkfifo(tmp_path / "tests" / "pipe")
    sandbox = await backend.create(SandboxSpec())
    with pytest.raises(SandboxError, match=r"Could not copy .*pipe: .*is a named pipe"):
        await sandbox.successor(read_only={"/tests": tmp_path / "tests"}, env={})
    await sandbox.destroy()


async def test_read_follows_no_link(sandbox):
    await sandbox.exec(
        "ln -s /etc/passwd /tmp/a; ln -s /etc /tmp/b; mkfifo /tmp/c; mkdir /tmp/d; echo hi > /tmp/d/e"
    )
    for path in ("/tmp/a", "/tmp/b/passwd", "/tmp/c", "/tmp/d", "/tmp/nothing", "/tmp/d/e/f"):
        assert await sandbox.read(path, 100) is None
    assert await sandbox.read("/tmp/d/e", 2) == b"hi"


async def test_mounts_are_seen_and_cannot_be_written(backend, tmp_path):
    (tmp_path / "file").write_text("from outside")
    tmp_path.chmod(0o755)
    spec = SandboxSpec(mounts=(Mount(tmp_path, "/opt/there"), Mount(tmp_path / "file", "/etc/one.conf")))
    sandbox = await backend.create(spec)
    try:
        done = await sandbox.exec("cat /opt/there/file /etc/one.conf; touch /opt/there/x; rm /opt/there/file")
        assert done.stdout == "from outside" * 2
        assert os.listdir(tmp_path) == ["file"]
        heir = await sandbox.successor(read_only={}, env={})
        try:
            assert (await heir.exec("ls /opt/there")).stdout == ""
        finally:
            await heir.destroy()
        assert os.listdir(tmp_path) == ["file"]
    finally:
        await sandbox.destroy()
    with pytest.raises(SandboxError, match="does not exist"):
        await backend.create(SandboxSpec(mounts=(Mount(tmp_path / "no", "/no"),)))
    if os.geteuid() == 0:
        tmp_path.chmod(0o700)
        with pytest.raises(SandboxError, match=r"may not read .*chmod o\+rX"):
            await backend.create(SandboxSpec(mounts=(Mount(tmp_path, "/opt/there"),)))


async def test_services_are_the_only_way_out(backend):
    async def greet(reader, writer):
        writer.write(b"hello " + await reader.readline())
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    sandbox = await backend.create(SandboxSpec(services={8080: f"127.0.0.1:{port}", 8081: "127.0.0.1:9"}))
    try:
        ask = "exec 3<>/dev/tcp/127.0.0.1/%d; echo you >&3; cat <&3"
        results = await asyncio.gather(*(sandbox.exec(ask % 8080, timeout=10) for _ in range(5)))
        assert [done.stdout for done in results] == ["hello you\n"] * 5
        assert (await sandbox.exec(ask % 8081, timeout=10)).stdout == ""
        assert (await sandbox.exec(ask % port, timeout=10)).exit_code != 0
        await sandbox.kill_processes()
        assert (await sandbox.exec(ask % 8080, timeout=10)).stdout == "hello you\n"
    finally:
        await sandbox.destroy()
        server.close()


# --- what users are told


async def test_images_are_refused(backend):
    with pytest.raises(UserError, match="cannot run 'debian:12'"):
        await backend.create(SandboxSpec(image="debian:12"))


async def test_work_directories_in_the_system_are_refused(backend):
    for workdir in ("/usr/src", "/proc/x", "relative", "/a/../etc"):
        with pytest.raises(SandboxError, match="cannot be a work directory"):
            await backend.create(SandboxSpec(workdir=workdir))


async def test_without_bubblewrap_there_is_one_sentence(sandboxes, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    bubblewrap.host.cache_clear()
    try:
        with pytest.raises(UserError, match="apt-get install bubblewrap"):
            await LocalBackend(sandboxes).create(SandboxSpec())
    finally:
        bubblewrap.host.cache_clear()


async def test_a_place_that_sandbox_users_cannot_enter_is_named(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can give sandboxes users of their own")
    (tmp_path / "closed").mkdir(mode=0o700)
    with pytest.raises(UserError, match=r"may not enter .*TITOGYM_SANDBOXES"):
        await LocalBackend(tmp_path / "closed" / "inner").create(SandboxSpec())


def test_where_namespaces_are_forbidden_there_is_one_sentence(sandboxes):
    program = "from titogym.envs.sandboxes import bubblewrap; bubblewrap.probe(None)"
    shell = f"echo 0 > /proc/sys/user/max_user_namespaces && exec {shutil.which('python3')} -c '{program}'"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", shell],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    assert "UserError: This machine does not let a sandbox have namespaces (bubblewrap: " in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_it_works_for_users_who_are_not_root(sandboxes):
    """Without control groups and users of their own: the same walls, limits per process."""
    home = Path(sandboxes, "..", f"{sandboxes.name}-nobody").resolve()
    home.mkdir()
    os.chown(home, 65534, 65534)
    program = f"""
import asyncio
from pathlib import Path
from titogym.envs.sandboxes.base import SandboxSpec
from titogym.envs.sandboxes.local import LocalBackend
from titogym.envs.task import Limits

async def main():
    backend = LocalBackend(Path({str(home)!r}))
    sandbox = await backend.create(SandboxSpec(limits=Limits(memory_mb=128, processes=20)))
    print((await sandbox.exec("id -u; touch /app /usr/x; ulimit -v; chmod 500 /workspace")).stdout.split())
    print((await sandbox.exec("python3 -c 'bytearray(400 << 20)'")).stderr.split()[-1])
    print((await sandbox.exec(":(){{ :|:& }};:; sleep 60", timeout=1)).timed_out)
    heir = await sandbox.successor(read_only={{"/tests": {{"x": "y"}}}}, env={{}})
    print((await heir.exec("cat /tests/x; ls /; stat -c %a /workspace")).stdout.split())
    await heir.destroy()

asyncio.run(main())
"""
    try:
        done = subprocess.run(
            [
                "setpriv",
                "--reuid=65534",
                "--regid=65534",
                "--clear-groups",
                "/usr/bin/python3",
                "-c",
                program,
            ],
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0] == "['0', '131072']"
        assert lines[1:3] == ["MemoryError", "True"]
        assert "'yapp'" in lines[3]
        assert os.listdir(home) == []
    finally:
        shutil.rmtree(home)


REPOSITORY = Path(__file__).parents[2]


async def running(sandbox) -> list[str]:
    """Command lines of what runs inside, process 1 and the asking shell aside."""
    script = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done 2>/dev/null"
    lines = (await sandbox.exec(script)).stdout.splitlines()
    return sorted(line.strip() for line in lines if line.startswith("sleep"))


async def eventually(ask, wanted) -> None:
    for _ in range(50):
        if await ask() == wanted:
            return
        await asyncio.sleep(0.05)
    assert await ask() == wanted


def own_children() -> set[str]:
    tasks = Path("/proc/self/task")
    return {pid for task in os.listdir(tasks) for pid in (tasks / task / "children").read_text().split()}


async def test_a_sandbox_that_makes_too_many_files_is_stopped(backend, monkeypatch):
    monkeypatch.setattr(storage, "INTERVAL", 0.1)
    monkeypatch.setattr(storage, "_FEWEST_FILES", 1000)
    monkeypatch.setattr(storage, "_LEAST_FILES", 100)
    sandbox = await backend.create(SandboxSpec(limits=Limits(storage_mb=16)))
    try:
        with pytest.raises(SandboxError, match="made more than its 1024 files"):
            await sandbox.exec("seq 5000 | xargs touch; sleep 30", timeout=60)
        assert sandbox.remarks == ["it made more than its 1024 files"]
    finally:
        await sandbox.destroy()


async def test_a_snapshot_starts_any_number_of_sandboxes(backend, sandbox):
    await sandbox.exec("echo one >state; ln -s /etc/shadow link; mkdir -m 700 closed; echo x >closed/file")
    snapshot = await sandbox.snapshot()
    try:
        await sandbox.exec("echo two >state")
        for _ in range(2):
            copy = await backend.create(SandboxSpec(image=snapshot))
            done = await copy.exec(
                "cat state closed/file; readlink link; echo ${COLOUR:-none}; echo mine >>state"
            )
            assert (done.stdout, done.stderr) == ("one\nx\n/etc/shadow\nnone\n", "")
            await copy.destroy()
        assert (await sandbox.exec("cat state")).stdout == "two\n"
    finally:
        await backend.delete_snapshot(snapshot)
        await backend.delete_snapshot(snapshot)
    with pytest.raises(SandboxError, match="There is no"):
        await backend.create(SandboxSpec(image=snapshot))


async def test_output_comes_as_it_is_written(sandbox):
    seen = []
    done = await sandbox.exec(
        "echo one; sleep 0.3; echo two >&2; sleep 0.3; echo three",
        max_output=10,
        on_output=lambda name, piece: seen.append((name, piece, time.monotonic())),
    )
    assert [(name, piece) for name, piece, _ in seen] == [
        ("stdout", b"one\n"),
        ("stderr", b"two\n"),
        ("stdout", b"three\n"),
    ]
    assert seen[2][2] - seen[0][2] > 0.4
    assert (done.stdout, done.truncated) == ("one\nthree\n", False)
