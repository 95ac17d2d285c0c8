"""The docker sandbox on a real engine: commands, ends, files, limits, what passes on, what is left."""

import asyncio
import os
import sys
import time

import pytest

from tests.envs.engine import BUSYBOX, SYSTEM, load_images, private_engine
from titogym.envs.sandboxes import registry
from titogym.envs.sandboxes.base import Build, Mount, SandboxError, SandboxSpec, Snapshot, Unsupported
from titogym.envs.sandboxes.docker import leftovers, ports
from titogym.envs.sandboxes.docker.backend import DockerBackend
from titogym.envs.sandboxes.docker.engine import SHORT_CALLS
from titogym.envs.task import AllowList, Limits
from titogym.errors import UserError

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker")]

SMALL = Limits(memory_mb=64, storage_mb=64, processes=40)


@pytest.fixture(scope="module")
def engine():
    with private_engine() as address:
        load_images(address)
        yield address


@pytest.fixture
async def backend(engine):
    """A backend; fails the test that leaves anything of a sandbox on the engine."""
    options = {"host": engine, "image": SYSTEM, "build_network": "none", "labels": {"run": "tests"}}
    made = registry.backend("docker", **options)
    assert isinstance(made, DockerBackend)
    yield made
    if made._engine is not None:
        assert things(made) == []
    await made.close()


def things(backend):
    """Everything on the engine that belongs to sandboxes."""
    api, wanted = backend.engine.api, {"label": "titogym.id"}
    return [
        *(found["Id"] for found in api.containers(all=True, filters=wanted)),
        *(found["Name"] for found in api.volumes(filters=wanted)["Volumes"] or ()),
        *(found["Id"] for found in api.images(filters=wanted)),
    ]


@pytest.fixture
async def sandbox(backend):
    made = await backend.create(SandboxSpec(limits=SMALL, env={"COLOUR": "blue"}))
    yield made
    await made.destroy()


# --- commands


async def test_output_and_exit_code(sandbox):
    done = await sandbox.exec("echo out; echo err >&2; exit 7")
    assert (done.exit_code, done.stdout, done.stderr) == (7, "out\n", "err\n")
    assert (done.timed_out, done.out_of_memory, done.truncated, done.running) == (False, False, False, 0)
    assert (await sandbox.exec(["printf", "%s|", "a b", "$HOME", "*"])).stdout == "a b|$HOME|*|"
    assert (await sandbox.exec("echo ${BASH_VERSION:+bash}")).stdout == "bash\n"


async def test_directory_environment_and_input(sandbox):
    done = await sandbox.exec(
        'pwd; echo "$COLOUR $SIZE $FROM_IMAGE"; cat', env={"SIZE": "9"}, stdin=b"\xe2\x82\xac" * 100_000
    )
    assert done.stdout == "/workspace\nblue 9 yes\n" + "€" * 100_000
    assert (await sandbox.exec("pwd", cwd="/tmp")).stdout == "/tmp\n"


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (["no-such-program"], 127, "not found"),
        (["/etc/passwd"], 126, "ermission denied"),
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


async def test_output_comes_as_it_is_written(sandbox):
    seen = []
    done = await sandbox.exec(
        "echo one; sleep 0.5; echo two >&2; sleep 0.5; echo three",
        on_output=lambda name, piece: seen.append((name, piece, time.monotonic())),
    )
    assert [(name, piece) for name, piece, _ in seen] == [
        ("stdout", b"one\n"),
        ("stderr", b"two\n"),
        ("stdout", b"three\n"),
    ]
    assert seen[2][2] - seen[0][2] > 0.7
    assert done.stdout == "one\nthree\n"


async def test_output_beyond_the_cap_is_dropped_and_the_command_ends(sandbox):
    done = await sandbox.exec("head -c 3000000 /dev/zero; echo end >&2", max_output=1000)
    assert (len(done.stdout), done.stderr, done.truncated, done.exit_code) == (1000, "end\n", True, 0)


# --- ends


async def test_timeout_kills_the_whole_tree_and_nothing_else(sandbox):
    await sandbox.exec("sleep 77 >/dev/null 2>&1 </dev/null &")
    started = time.monotonic()
    done = await sandbox.exec(
        "(sleep 78; echo no) & setsid sleep 79 & (setsid sh -c 'sleep 80 & sleep 81' &) ;"
        "env -i setsid sh -c 'env -i sleep 82 & env -i sleep 83 &' ; echo started; sleep 84",
        timeout=1,
    )
    assert time.monotonic() - started < 10
    assert (done.exit_code, done.timed_out, done.stdout) == (124, True, "started\n")
    assert (await left(sandbox)).split() == ["77"]


async def test_a_fork_bomb_is_ended_and_the_files_stay(sandbox):
    await sandbox.exec("echo kept >/workspace/note")
    done = await sandbox.exec("bomb() { bomb | bomb & }; bomb; sleep 100", timeout=1)
    assert done.timed_out
    assert (await sandbox.exec("cat note; echo alive")).stdout == "kept\nalive\n"
    assert "bomb" not in await left(sandbox)


async def test_out_of_memory_is_told_from_a_plain_kill(sandbox):
    hungry = await sandbox.exec(["python3", "-c", "x = b'x' * (500 << 20)"])
    assert (hungry.exit_code, hungry.out_of_memory, hungry.timed_out) == (137, True, False)
    killed = await sandbox.exec("kill -9 $$")
    assert (killed.exit_code, killed.out_of_memory, killed.timed_out) == (137, False, False)


async def test_a_container_that_dies_of_memory_says_so(backend):
    for _ in range(2):  # the engine learns of its end sooner or later
        sandbox = await backend.create(SandboxSpec(limits=SMALL))
        try:
            filled = await sandbox.exec("head -c 100000000 /dev/zero >/dev/shm/file")
            assert (filled.exit_code, filled.out_of_memory) == (137, True)
        finally:
            await sandbox.destroy()


async def test_cancelling_kills_the_command(sandbox):
    task = asyncio.create_task(sandbox.exec("sleep 91"))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await left(sandbox) == ""


async def test_killing_everything_and_going_on(sandbox):
    await sandbox.exec("sleep 92 </dev/null >/dev/null 2>&1 & echo here >/workspace/file")
    await sandbox.kill_processes()
    assert await sandbox.read("/workspace/file", 100) == b"here\n"
    assert await left(sandbox) == ""
    await sandbox.exec("kill -9 -1; true")  # the container's own first process too
    assert (await sandbox.exec("cat file")).stdout == "here\n"


async def left(sandbox):
    """What the `sleep`s and shells of the test wait for, the one that keeps the container alive aside."""
    script = (
        "for d in /proc/[0-9]*; do l=$(tr '\\0' ' ' <$d/cmdline); case $l in 'sleep 2147'*) ;; 'sleep '*) "
        "echo ${l#sleep } ;; *bomb*) echo bomb ;; esac; done"
    )
    return (await sandbox.exec(["sh", "-c", script])).stdout.replace("bomb\n", "", 1).strip()


async def test_commands_that_take_long_occupy_no_thread(sandbox, backend):
    other = await backend.create(SandboxSpec(limits=Limits(memory_mb=256, processes=300)))
    try:
        waiting = [asyncio.create_task(other.exec("sleep 60")) for _ in range(2 * SHORT_CALLS)]
        started = time.monotonic()
        while (await other.exec("echo")).running < len(waiting):
            assert time.monotonic() - started < 30
        assert (await sandbox.exec("echo quick")).stdout == "quick\n"
        await other.kill_processes()
        assert {done.exit_code for done in await asyncio.gather(*waiting)} == {137}
    finally:
        await other.destroy()


# --- files


async def test_files_and_trees_go_in_and_out(sandbox, tmp_path):
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "a.txt").write_text("a")
    (tree / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "out").symlink_to("/etc/shadow")
    await sandbox.upload(tree, "/workspace/deep/er")
    await sandbox.upload({"b/c.txt": "ü"}, "/workspace")
    await sandbox.upload(tree / "run.sh", "/workspace/other.sh")
    done = await sandbox.exec("deep/er/run.sh; ./other.sh; cat b/c.txt; readlink deep/er/out")
    assert done.stdout == "ran\nran\nü/etc/shadow\n"
    await sandbox.exec("rm deep/er/out")
    await sandbox.download("/workspace/deep", tmp_path / "back")
    assert (tmp_path / "back" / "er" / "sub" / "a.txt").read_text() == "a"
    await sandbox.download("/workspace/b/c.txt", tmp_path / "c.txt")
    assert (tmp_path / "c.txt").read_text() == "ü"
    with pytest.raises(SandboxError, match="/workspace/none"):
        await sandbox.download("/workspace/none", tmp_path / "none")


async def test_reading_follows_no_link(sandbox):
    await sandbox.exec("mkdir real; echo secret >real/file; ln -s real way; ln -s file real/link; mkfifo p")
    assert await sandbox.read("/workspace/real/file", 3) == b"sec"
    for path in ("way/file", "real/link", "real", "p", "none", "real/file/x"):
        assert await sandbox.read(f"/workspace/{path}", 100) is None


async def test_mounts_are_read_only(backend, tmp_path):
    (tmp_path / "tool").write_text("text")
    tmp_path.chmod(0o755)
    sandbox = await backend.create(SandboxSpec(mounts=(Mount(tmp_path, "/opt/tool"),)))
    try:
        done = await sandbox.exec("cat /opt/tool/tool; echo x >/opt/tool/new")
        assert done.stdout == "text"
        assert "Read-only" in done.stderr
    finally:
        await sandbox.destroy()
    with pytest.raises(UserError, match="does not exist"):
        await backend.create(SandboxSpec(mounts=(Mount(tmp_path / "none", "/x"),)))


# --- limits and rights


async def test_limits_and_rights_reach_the_container(sandbox, backend):
    found = backend.engine.api.inspect_container(sandbox._container)
    host = found["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == 64 << 20
    assert host["NanoCpus"] == 10**9
    assert host["PidsLimit"] == 42
    assert host["CapDrop"] == ["ALL"]
    assert "no-new-privileges" in host["SecurityOpt"]
    assert host["NetworkMode"] == "none"
    assert host["Init"] is True
    for name, value in (("run", "tests"), ("id", sandbox.id)):
        assert found["Config"]["Labels"][f"titogym.{name}"] == value
    assert {"titogym.owner", "titogym.expires"} <= set(found["Config"]["Labels"])
    more = await backend.create(SandboxSpec(limits=Limits(cpus=10_000)))  # than this machine has
    assert (await more.exec("echo here")).stdout == "here\n"
    await more.destroy()
    done = await sandbox.exec("dd if=/dev/zero of=big bs=1M count=100; mknod /tmp/disk b 8 0; ls -s big")
    assert "File size limit exceeded" in done.stderr
    assert "Operation not permitted" in done.stderr


async def test_no_network(sandbox):
    script = "import socket; socket.create_connection(('192.0.2.1', 80), 3)"
    assert "unreachable" in (await sandbox.exec(["python3", "-c", script])).stderr


@pytest.mark.parametrize("root", [True, False], ids=["from outside", "by a container beside it"])
async def test_services_and_allow_lists(backend, root, monkeypatch):
    if not root:
        monkeypatch.setattr(ports, "listen_inside", refuse)

    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + head.split(b"\r\n")[0] * (50_000 if b"big" in head else 1))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    sandbox = await backend.create(
        SandboxSpec(
            services={8080: f"127.0.0.1:{port}"}, network=AllowList(("localhost", "127.0.0.1", "::1"))
        )
    )
    fetch = (
        "import sys, urllib.request as u\n"
        "try: print(u.urlopen(sys.argv[1]).read().decode())\n"
        "except Exception as e: print(e)"
    )
    try:

        async def get(url, **env):
            return (await sandbox.exec(["python3", "-c", fetch, url], env=env)).stdout.strip()

        for _ in range(2):
            assert await get("http://127.0.0.1:8080/a") == "GET /a HTTP/1.1"
            assert await get(f"http://localhost:{port}/b", no_proxy="", NO_PROXY="") == "GET /b HTTP/1.1"
            assert len(await get("http://127.0.0.1:8080/big")) == 50_000 * len("GET /big HTTP/1.1")
            assert "403" in await get("http://elsewhere.example/")
            assert "refused" in await get(f"http://127.0.0.1:{port}/")
            await sandbox.kill_processes()  # the ports are there again afterwards
    finally:
        await sandbox.destroy()
        server.close()


async def test_a_service_beside_an_open_network(engine):
    async def answer(reader, writer):
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    backend = DockerBackend(engine, SYSTEM, network="none")  # the tests' engine has no other
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    sandbox = await backend.create(SandboxSpec(services={8080: address}, network="open", limits=SMALL))
    try:
        fetch = "import socket; print(socket.create_connection(('127.0.0.1', 8080)).recv(9))"
        assert (await sandbox.exec(["python3", "-c", fetch])).stdout == "b'hello'\n"
    finally:
        await sandbox.destroy()
        await backend.close()
        server.close()


def refuse(pid, numbers):
    raise Unsupported("as to anybody but root")


# --- images


async def test_a_missing_image_is_one_sentence(backend):
    with pytest.raises(UserError, match=r"'nowhere\.invalid/image:1' is not on the engine and cannot"):
        await backend.create(SandboxSpec(image="nowhere.invalid/image:1"))


async def test_an_image_without_bash(backend):
    sandbox = await backend.create(SandboxSpec(image=BUSYBOX))
    try:
        assert (await sandbox.exec("echo $0; sleep 70 & echo hi")).stdout == "/bin/sh\nhi\n"
        assert (await sandbox.exec("sleep 71 & env -i setsid sleep 72 & sleep 73", timeout=1)).timed_out
        assert await left(sandbox) == "70"
    finally:
        await sandbox.destroy()


async def test_dockerfiles_are_built_once(backend, tmp_path):
    (tmp_path / "Dockerfile").write_text(
        f"FROM {SYSTEM}\nRUN echo built >/etc/mark\nCOPY data /data\nRUN mkdir /app && chown 1000 /app\n"
        "ENV COLOUR=red\nUSER 1000\nWORKDIR /app\n"
    )
    (tmp_path / "data").write_text("data")
    spec = SandboxSpec(image=Build(tmp_path), workdir="/app")
    started = time.monotonic()
    sandboxes = await asyncio.gather(*(backend.create(spec) for _ in range(3)))
    first = time.monotonic() - started
    try:
        for sandbox in sandboxes:
            await sandbox.upload({"mine.txt": "x"}, "/app")
            done = await sandbox.exec(
                "cat /etc/mark /data; echo $COLOUR; id -u; echo y >>mine.txt; cat mine.txt"
            )
            assert (done.stdout, done.stderr) == ("built\ndatared\n1000\nxy\n", "")
        assert first < 60
        (tmp_path / "data").write_text("other")
        changed = await backend.create(spec)
        assert (await changed.exec("cat /data")).stdout == "other"
        await changed.destroy()
    finally:
        for sandbox in sandboxes:
            await sandbox.destroy()
    (tmp_path / "Dockerfile").write_text(f"FROM {SYSTEM}\nRUN echo so sad; exit 3\n")
    with pytest.raises(SandboxError, match=r"(?s)could not be built: .*non-zero code: 3.*so sad"):
        await backend.create(spec)
    (tmp_path / "Dockerfile").write_text(f"FROM {SYSTEM}\nRUN echo on and on; sleep 100\n")
    with pytest.raises(SandboxError, match=r"(?s)could not be built: .*not done within 2 s.*on and on"):
        await backend.create(SandboxSpec(image=Build(tmp_path, seconds=2)))
    (tmp_path / "Dockerfile").unlink()
    with pytest.raises(UserError, match="Dockerfile is missing"):
        await backend.create(spec)


async def test_nobody_has_to_wait_for_a_build_that_says_nothing(engine, tmp_path):
    (tmp_path / os.fsdecode(b"\xff")).write_text("no text, but a file")
    (tmp_path / "Dockerfile").write_text(f"FROM {SYSTEM}\nRUN echo on and on; sleep 100\n")
    program = (
        "import asyncio, pathlib, sys\n"
        "from titogym.envs.sandboxes.base import Build, SandboxSpec\n"
        "from titogym.envs.sandboxes.docker.backend import DockerBackend\n"
        "async def main():\n"
        "    backend = DockerBackend(sys.argv[1], build_network='none')\n"
        "    async with asyncio.timeout(3):\n"
        "        await backend.create(SandboxSpec(image=Build(pathlib.Path(sys.argv[2]))))\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, engine, str(tmp_path), stderr=asyncio.subprocess.PIPE
    )
    _, said = await asyncio.wait_for(process.communicate(), 30)
    assert said.decode().strip().endswith("TimeoutError")


# --- what passes on


async def test_a_snapshot_starts_any_number_of_sandboxes(backend, sandbox):
    await sandbox.exec("echo one >state")
    snapshot = await sandbox.snapshot()
    try:
        await sandbox.exec("echo two >state")
        copies = await asyncio.gather(*(backend.create(SandboxSpec(image=snapshot)) for _ in range(2)))
        for copy in copies:
            done = await copy.exec("cat state; echo ${COLOUR:-none}; echo mine >state")
            assert done.stdout.startswith("one\n")
            await copy.destroy()
        assert (await sandbox.exec("cat state")).stdout == "two\n"
    finally:
        await backend.delete_snapshot(snapshot)
        await backend.delete_snapshot(snapshot)
    with pytest.raises(SandboxError, match="any more"):
        await backend.create(SandboxSpec(image=snapshot))
    with pytest.raises(Unsupported):
        await backend.delete_snapshot(Snapshot("local", "x"))


async def test_the_successor_has_the_files_and_nothing_that_runs(backend):
    sandbox = await backend.create(SandboxSpec(limits=SMALL, env={"COLOUR": "blue", "KEPT": "old"}))
    heir = None
    try:
        await sandbox.exec(
            "echo work >result; sleep 95 </dev/null >/dev/null 2>&1 & mkdir -p /logs/verifier /tests;"
            "python3 -c 'import json'; echo 1 >/logs/verifier/reward.txt;"
            "echo mine >/tests/test.sh; echo '#!/bin/sh' >/usr/bin/diff;"
            "ln -s /workspace /etc/shortcut"
        )
        heir = await sandbox.successor(read_only={"/tests": {"test.sh": "echo theirs"}}, env={"KEPT": "new"})
        with pytest.raises(SandboxError):
            await sandbox.exec("true")
        done = await heir.exec(
            "cat result /tests/test.sh; find /logs -name 'reward*'; echo ${COLOUR:-none} $KEPT $FROM_IMAGE;"
            "echo x >/tests/test.sh"
        )
        assert done.stdout == "work\necho theirsnone new yes\n"
        assert "Read-only" in done.stderr
        assert await left(heir) == ""
        assert heir.remarks == [
            "the agent changed system files: /etc/shortcut (added), /usr/bin/diff (changed)"
        ]
        await heir.exec("echo 0.5 >/logs/verifier/reward.txt; sleep 96 >/dev/null &")
        await heir.kill_processes()
        assert await heir.read("/logs/verifier/reward.txt", 100) == b"0.5\n"
    finally:
        await (heir or sandbox).destroy()


async def test_volumes_of_the_image_pass_on_and_programs_on_its_path_are_remarked(backend, tmp_path):
    (tmp_path / "Dockerfile").write_text(
        f"FROM {SYSTEM}\nRUN mkdir -m 700 /app && chown 1000:1000 /app && touch /app/a /app/b\n"
        "VOLUME /app\nWORKDIR /app\nRUN mkdir -p /opt/x/bin\nENV PATH=/opt/x/bin:/usr/bin:/bin\n"
    )
    sandbox = await backend.create(SandboxSpec(image=Build(tmp_path), workdir="/app", limits=SMALL))
    try:
        await sandbox.exec("echo new >a; rm b; echo mine >c; touch /opt/x/mine /opt/x/bin/sleep")
        with pytest.raises(Unsupported, match="/app"):
            await sandbox.snapshot()
        sandbox = await sandbox.successor(read_only={"/tests": {"test.sh": "true"}}, env={})
        assert sandbox.remarks == ["the agent changed system files: /opt/x/bin/sleep (added)"]
        done = await sandbox.exec("head -n 9 *; find . -maxdepth 0 -printf '%m %U\n'")
        assert done.stdout == "==> a <==\nnew\n\n==> c <==\nmine\n700 1000\n"
    finally:
        await sandbox.destroy()
    assert not backend.engine.api.volumes()["Volumes"]  # those without a label of ours too


async def test_a_failed_successor_leaves_nothing(backend):
    sandbox = await backend.create(SandboxSpec())
    try:
        with pytest.raises((SandboxError, OSError)):
            await sandbox.successor(read_only={"relative": {"x": "y"}}, env={})
    finally:
        await sandbox.destroy()
        await sandbox.destroy()


# --- what is left


async def test_cancelled_creations_leave_nothing(backend):
    await (await backend.create(SandboxSpec())).destroy()
    for delay in (0.0, 0.02, 0.1, 0.3):
        task = asyncio.create_task(backend.create(SandboxSpec()))
        await asyncio.sleep(delay)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
        else:  # it was quicker than that
            await task.result().destroy()
    assert things(backend) == []


async def test_what_will_not_go_is_tried_again_and_told(backend, monkeypatch):
    sandbox = await backend.create(SandboxSpec())
    remove, tries = leftovers.remove, []

    async def failing(engine, name):
        tries.append(name)
        raise SandboxError("the disk is on fire")

    monkeypatch.setattr(leftovers, "remove", failing)
    backend.destruction._pauses = (0.01, 0.01)
    with pytest.raises(SandboxError, match="could not be destroyed: the disk is on fire"):
        await sandbox.destroy()
    assert tries == [sandbox.id] * 3
    assert backend.undestroyed == {sandbox.id: "SandboxError: the disk is on fire"}
    monkeypatch.setattr(leftovers, "remove", remove)
    await backend.destruction.remaining()
    assert backend.undestroyed == {}


async def test_no_engine_is_one_sentence():
    with pytest.raises(UserError, match="No container engine answers at unix:///nowhere"):
        await DockerBackend("unix:///nowhere/docker.sock").create(SandboxSpec())


async def test_a_sandbox_that_fills_its_disk_is_stopped(sandbox):
    done = await sandbox.exec("for n in 1 2 3; do dd if=/dev/zero of=big$n bs=1M count=50; done; sleep 60")
    assert done.exit_code == 137
    with pytest.raises(SandboxError, match="more than its 64 MiB of storage"):
        await sandbox.exec("true")
    assert sandbox.remarks == ["it used more than its 64 MiB of storage"]
