"""One sandbox: a container that sleeps, in which commands are executed."""

import asyncio
import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from titogym.cancellation import to_its_end
from titogym.envs.sandboxes import archives, labels, owners
from titogym.envs.sandboxes.base import (
    CANNOT_RUN,
    OUT_OF_MEMORY,
    TIMED_OUT,
    ExecResult,
    Output,
    SandboxError,
    SandboxSpec,
    Snapshot,
    Unsupported,
)
from titogym.envs.sandboxes.docker import commands, container, files, leftovers, volumes
from titogym.envs.sandboxes.docker.engine import EngineError
from titogym.envs.sandboxes.docker.images import BACKEND, Image
from titogym.envs.sandboxes.docker.ports import Ports, open_ports
from titogym.envs.sandboxes.doors import doors_of, environment_of
from titogym.envs.sandboxes.storage import Used

if TYPE_CHECKING:
    from titogym.envs.sandboxes.docker.backend import DockerBackend

log = logging.getLogger(__name__)

KILL_SECONDS = 5.0  # from killing a command until the whole container is killed instead
SNAPSHOTS = "titogym-snapshot"  # repository of kept file systems
HEIRS = "titogym-successor"  # repository of those that pass from a sandbox to its successor
_MIB = 1 << 20
_NOT_FOUND = 127
_GONE = 404
_RESTARTS = (0.0, 0.2, 1.0)  # s before each: what a dead container still holds may kill the next one too
_LOOK_SECONDS = 5.0  # between looks whether a command has ended without closing its output
_LOGS = {"agent/.keep": "", "verifier/.keep": ""}


class DockerSandbox:
    """One container. It is started when first needed and again after `kill_processes`."""

    def __init__(self, backend: "DockerBackend", spec: SandboxSpec, image: Image) -> None:
        self.id = owners.new_id()
        self.remarks: list[str] = []
        self.storage_mb = spec.limits.storage_mb
        self._backend = backend
        self._engine = backend.engine
        self._spec = spec
        self._image = image
        self._labels = labels.labels(self.id, spec, {})
        self._container = ""
        self._pid = 0  # of the container's first process, as the engine's machine counts
        self._serving = doors_of(spec)
        self._ports: Ports | None = None
        self._owner = 0  # user id that uploaded files belong to
        self._oom_kills = 0
        self._full = ""
        self._running = False
        self._starting = asyncio.Lock()
        self._destroyed = False

    async def start(
        self,
        *,
        mounts: Sequence[Mapping[str, object]] = (),
        environment: Sequence[str] | None = None,
    ) -> None:
        """Create the container and start it."""
        if environment is None:
            environment = [f"{name}={value}" for name, value in self._variables().items()]
        self._container = await self._create(mounts, environment)
        if self._backend.storage is not None and not self._backend.limits_disk:
            self._backend.storage.add(self)
        await self._ensure_running()
        if self._image.user.partition(":")[0] not in ("", "0", "root"):
            self._owner = int((await self.exec(["id", "-u"], cwd="/")).stdout.strip() or 0)
            await self.exec(f"mkdir -p {self._spec.workdir}", cwd="/")

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        max_output: int = 1 << 20,
        on_output: Output | None = None,
    ) -> ExecResult:
        arguments = [*commands.SHELL, command] if isinstance(command, str) else list(command)
        captured = commands.Captured(max_output, on_output)
        try:
            "\0".join(arguments).encode()
        except UnicodeEncodeError as error:
            return ExecResult(CANNOT_RUN, "", f"sandbox: {error}\n")
        if any("\0" in argument for argument in arguments):
            return ExecResult(CANNOT_RUN, "", "sandbox: a command holds a NUL character\n")
        running = await to_its_end(self._begin(arguments, cwd, env or {}, stdin is not None))
        try:
            timed_out = await self._attend(running, stdin, captured, timeout)
        finally:
            running.close()
        status, pids = await self._outcome(running)
        if status in (CANNOT_RUN, _NOT_FOUND) and captured.stdout.startswith(b"OCI runtime exec failed"):
            captured.stderr, captured.stdout = captured.stdout, bytearray()
            status = _NOT_FOUND if b"not found" in captured.stderr else status
        out_of_memory = not timed_out and status != 0 and await self._ran_out_of_memory(status)
        return ExecResult(
            TIMED_OUT if timed_out else OUT_OF_MEMORY if out_of_memory else status,
            captured.stdout.decode(errors="replace"),
            captured.stderr.decode(errors="replace"),
            timed_out=timed_out,
            out_of_memory=out_of_memory,
            truncated=captured.truncated,
            running=pids,
        )

    async def upload(self, source: archives.Tree, target: str) -> None:
        archive = await asyncio.to_thread(archives.pack, source, target, owner=self._owner)
        await self._settled()
        await files.put(self._engine, self._container, archive, target)

    async def download(self, source: str, target: Path) -> None:
        with tempfile.TemporaryFile() as spool:
            name = await files.get(self._engine, self._container, source, spool, self.storage_mb * _MIB)
            await asyncio.to_thread(_unpack, spool, name, target)

    async def read(self, path: str, limit: int) -> bytes | None:
        return await files.read(self._engine, self._container, path, limit)

    async def kill_processes(self) -> None:
        await to_its_end(self._kill())

    async def over_storage(self, deed: str) -> None:
        """Called by the storage watch: the agent has filled its disk and may do nothing more."""
        self._full = deed
        self.remarks.append(deed)
        await self.kill_processes()

    async def used(self) -> Used:
        """MiB that the container has written, as the engine counts them; it counts no files."""
        found = await self._engine.call(
            self._engine.api.containers, all=True, size=True, filters={"id": self._container}
        )
        return Used(int(found[0].get("SizeRw") or 0) // _MIB if found else 0, 0)

    async def successor(
        self, *, read_only: Mapping[str, archives.Tree], env: Mapping[str, str]
    ) -> "DockerSandbox":
        if self._destroyed:
            raise SandboxError("The sandbox has been destroyed.")
        await self.kill_processes()
        spec = replace(self._spec, image=None, env=dict(env), mounts=(), services={})
        heir = DockerSandbox(self._backend, spec, self._image)
        try:
            changes = await files.changes_of_the_system(self._engine, self._container, self._image.path)
            heir.remarks += [*self.remarks, *changes]
            await to_its_end(self._bequeath(heir, read_only))
            await self.destroy()
        except BaseException:
            await heir.destroy()
            raise
        return heir

    async def snapshot(self) -> Snapshot:
        if self._destroyed:
            raise SandboxError("The sandbox has been destroyed.")
        if own := await files.own_volumes(self._engine, self._container):
            raise Unsupported(f"The image keeps {', '.join(own)} in a volume, which no snapshot holds.")
        name = owners.new_id()
        snapshot = Snapshot(BACKEND, f"{SNAPSHOTS}:{name}")
        try:
            await to_its_end(self._commit(SNAPSHOTS, name))
        except BaseException:
            await self._backend.delete_snapshot(snapshot)
            raise
        return snapshot

    async def destroy(self) -> None:
        self._destroyed = True
        await self._backend.destruction(self.id, self._destroy)

    async def _destroy(self) -> None:
        if self._backend.storage is not None:
            self._backend.storage.discard(self)
        await self._close_ports()
        await leftovers.remove(self._engine, self.id)

    # --- the container

    async def _create(self, mounts: Sequence[Mapping[str, object]], environment: Sequence[str]) -> str:
        def create() -> str:
            return container.create(
                self._engine.api,
                self._image.reference,
                f"titogym-{self.id}",
                self._spec,
                labels=self._labels,
                environment=environment,
                mounts=mounts,
                network=self._backend.network,
                limit_disk=self._backend.limits_disk,
            )

        try:
            return await self._engine.call(create)
        except EngineError as error:
            if "storage-opt" not in str(error):
                raise
        if self._backend.limits_disk:
            self._backend.limits_disk = False
            log.info("the engine's storage driver has no limits: who fills the disk is killed instead")
        return await self._engine.call(create)

    def _variables(self) -> dict[str, str]:
        return {**environment_of(self._spec), **self._spec.env, commands.MARK: commands.MAIN}

    async def _ensure_running(self) -> None:
        async with self._starting:
            if self._destroyed:
                raise SandboxError("The sandbox has been destroyed.")
            if self._full:
                raise SandboxError(f"The sandbox was stopped: {self._full}.")
            if self._running:
                return
            await self._close_ports()
            await self._engine.call(self._engine.api.start, self._container)
            self._running = True
            state = (await self._engine.call(self._engine.api.inspect_container, self._container))["State"]
            self._pid, self._oom_kills = state["Pid"], 0
            if self._serving:
                self._ports = await open_ports(
                    self._engine,
                    self._container,
                    self._pid,
                    self._serving,
                    image=self._backend.plain_image,
                    labels=self._labels,
                )

    async def _close_ports(self) -> None:
        ports, self._ports = self._ports, None
        if ports is not None:
            await ports.close()

    async def _kill(self) -> None:
        async with self._starting:
            await self._close_ports()
            self._running = False
            if not self._container or self._destroyed:
                return
            try:
                await self._engine.call(self._engine.api.kill, self._container)
                await self._engine.call(self._engine.api.wait, self._container, timeout=60)
            except EngineError as error:
                if error.status not in (_GONE, 409):  # it has gone, or does not run
                    raise

    async def _settled(self) -> None:
        if self._destroyed:
            raise SandboxError("The sandbox has been destroyed.")

    # --- commands

    async def _begin(
        self, arguments: list[str], cwd: str | None, env: Mapping[str, str], stdin: bool
    ) -> commands.Running:
        for pause in (*_RESTARTS, None):
            await self._ensure_running()
            try:
                return await commands.start(
                    self._engine,
                    self._container,
                    arguments,
                    cwd=cwd or self._spec.workdir,
                    env=env,
                    stdin=stdin,
                )
            except EngineError as error:
                if error.status != 409 or pause is None:
                    raise SandboxError(f"The sandbox does not take commands: {error}") from error
                self._running = False  # something inside has killed its first process
                await asyncio.sleep(pause)
        raise AssertionError("the last try returns or raises")

    async def _attend(
        self,
        running: commands.Running,
        stdin: bytes | None,
        captured: commands.Captured,
        timeout: float | None,
    ) -> bool:
        """Wait for the end of a command, or bring it about. True when its time was over."""
        reading = asyncio.create_task(running.communicate(stdin, captured))
        try:
            ended = await self._until(running, reading, timeout)
            if not ended:
                await to_its_end(self._end(running, reading))
            return not ended
        except asyncio.CancelledError:
            await to_its_end(self._end(running, reading))
            raise
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading

    async def _until(
        self, running: commands.Running, reading: "asyncio.Task[None]", timeout: float | None
    ) -> bool:
        """Wait for a command's end. False when its time is over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _LOOK_SECONDS if deadline is None else min(_LOOK_SECONDS, deadline - time.monotonic())
            done, _ = await asyncio.wait({reading}, timeout=max(0.0, left))
            if done:
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            try:  # an engine that forgets to close the output of what it could not start
                found = await self._engine.call(self._engine.api.exec_inspect, running.execution)
            except EngineError as error:
                found = {"Running": error.status != _GONE}
            if not found["Running"]:
                await asyncio.wait({reading}, timeout=1)
                return True

    async def _end(self, running: commands.Running, reading: "asyncio.Task[None]") -> None:
        """Kill a command's tree; where that does not help, everything in the container."""
        with suppress(EngineError, TimeoutError):
            await commands.kill(self._engine, self._container, running.mark)
            done, _ = await asyncio.wait({reading}, timeout=KILL_SECONDS)
            if done:
                return
        log.info("a command in sandbox %s would not die: everything in it is killed", self.id)
        await self._kill()

    async def _outcome(self, running: commands.Running) -> tuple[int, int]:
        """Exit status of a command that has ended, and how many processes it leaves."""
        inspect = self._engine.api.exec_inspect
        for pause in (0.01, 0.05, 0.25, 1.0):
            try:
                found = await self._engine.call(inspect, running.execution)
            except EngineError as error:
                if error.status == _GONE:  # forgotten, with the container that was killed
                    return OUT_OF_MEMORY, 0
                raise
            if not found["Running"]:
                break
            await asyncio.sleep(pause)
        status = found["ExitCode"]
        return OUT_OF_MEMORY if status is None else int(status), await self._processes()

    async def _processes(self) -> int:
        if not self._running:
            return 0
        found = await self._engine.call(self._engine.api.stats, self._container, stream=False, one_shot=True)
        return max(0, int((found.get("pids_stats") or {}).get("current") or 0) - container.OWN_PROCESSES)

    async def _ran_out_of_memory(self, status: int) -> bool:
        """Whether the kernel has killed something in here since this was last asked."""
        text = (
            await asyncio.to_thread(container.counters_from_outside, self._pid) if self._engine.here else None
        )
        if text is None:
            if status != OUT_OF_MEMORY or not self._running:
                return False
            text = await self._counters_from_inside()
            if "oom_kill " not in text:
                return await self._died_of_memory()
        kills = container.oom_kills(text)
        more, self._oom_kills = kills > self._oom_kills, kills
        return more

    async def _counters_from_inside(self) -> str:
        captured = commands.Captured(1 << 16)
        line = ["/bin/sh", "-c", f"cat {' '.join(container.OOM_COUNTERS)} 2>/dev/null"]
        try:
            running = await commands.start(self._engine, self._container, line, cwd="/", env={}, stdin=False)
        except EngineError:  # the container is not running any more
            return ""
        try:
            await self._attend(running, None, captured, KILL_SECONDS)
        finally:
            running.close()
        return captured.stdout.decode(errors="replace")

    async def _died_of_memory(self) -> bool:
        """Whether the whole container, whose counters went with it, was killed for want of memory."""
        for pause in (0.1, 0.5, 1.0, 0.0):  # the engine learns of it a little later
            state = (await self._engine.call(self._engine.api.inspect_container, self._container))["State"]
            if not state["Running"]:
                return bool(state["OOMKilled"])
            await asyncio.sleep(pause)
        return False

    # --- what passes on

    async def _commit(self, repository: str, name: str) -> None:
        """Keep the file system as the image `repository:name`, which bears the labels of `name`."""
        borne = {**self._labels, labels.ID: name}
        changes = [f"LABEL {_quoted(key)}={_quoted(value)}" for key, value in borne.items()]
        await self._engine.long_call(
            self._engine.api.commit, self._container, repository, name, changes=changes
        )

    async def _bequeath(self, heir: "DockerSandbox", read_only: Mapping[str, archives.Tree]) -> None:
        await self._commit(HEIRS, heir.id)
        heir._image = replace(self._image, reference=f"{HEIRS}:{heir.id}")
        heir._owner = self._owner
        mounts: list[Mapping[str, object]] = []
        for number, (target, tree) in enumerate({**read_only, "/logs": _LOGS}.items()):
            volume = f"titogym-{heir.id}-{number}"
            await volumes.fill(self._engine, heir._image.reference, volume, tree, heir._labels)
            mounts.append(volumes.mount(volume, target, read_only=target != "/logs"))
        for number, target in enumerate(await files.own_volumes(self._engine, self._container)):
            if target in read_only:
                continue
            volume = f"titogym-{heir.id}-image-{number}"
            with tempfile.TemporaryFile() as spool:
                most = self.storage_mb * _MIB
                top = await files.get(self._engine, self._container, target, spool, most)
                spool.seek(0)
                await volumes.refill(self._engine, heir._image.reference, volume, spool, top, heir._labels)
            mounts.append(volumes.mount(volume, target, read_only=False))
        variables = heir._variables()
        if "PATH" in variables:  # the image's own programs are found after those that were named
            own = [part for part in self._image.path.split(":") if part not in variables["PATH"].split(":")]
            variables["PATH"] = ":".join([variables["PATH"], *filter(None, own)])
        # Compiled modules that the agent may have planted beside Python's own are not looked at.
        variables.setdefault("PYTHONPYCACHEPREFIX", "/logs/.pycache")
        # A name without a value takes a variable of the agent's container away.
        dropped = [name for name in self._variables() if name not in variables]
        await heir.start(
            mounts=mounts, environment=[*(f"{key}={value}" for key, value in variables.items()), *dropped]
        )


def _unpack(spool: IO[bytes], name: str, target: Path) -> None:
    spool.seek(0)
    archives.unpack(spool, name, target)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("\n", " ")
    return f'"{escaped}"'
