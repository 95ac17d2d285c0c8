"""Sandboxes on this machine, by bubblewrap: Linux namespaces over a private directory.

What the agent has: the system's programs read-only, a private root directory for everything else, no
network, its own process, user, IPC, host-name and control-group namespaces, no capability but to pass
over the modes of its own files, and limits on memory, processes, CPU, storage and file size. Run as
root, each sandbox gets a user id of its own on the host; run as anybody else it needs a kernel that
lets users make namespaces. Everything in a sandbox dies with the driver, however that ends.
"""

import asyncio
import errno
import logging
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from titogym.cancellation import to_its_end
from titogym.envs import dockerfile
from titogym.envs.sandboxes import archives, bubblewrap, cgroups, owners, reaper, snapshots
from titogym.envs.sandboxes.base import (
    CANNOT_RUN,
    OUT_OF_MEMORY,
    SYSTEM_PATH,
    TIMED_OUT,
    Build,
    ExecResult,
    Mount,
    Output,
    Reaped,
    SandboxError,
    SandboxSpec,
    Snapshot,
    Unsupported,
)
from titogym.envs.sandboxes.destruction import Destruction
from titogym.envs.sandboxes.doors import Door, doors_of, environment_of
from titogym.envs.sandboxes.machine import Machine, Outcome
from titogym.envs.sandboxes.storage import StorageWatch, Used, used_by
from titogym.errors import UserError
from titogym.venvs import home

log = logging.getLogger(__name__)

_BASE_ENV = {"PATH": SYSTEM_PATH, "HOME": "/root", "LANG": "C.UTF-8", "USER": "root"}
_FIRST_USER, _USERS = 2_000_000_000, 100_000_000  # host user ids that nobody else hands out


def default_root() -> Path:
    """Where sandboxes live: `$TITOGYM_SANDBOXES`, else a directory that their users can reach."""
    if configured := os.environ.get("TITOGYM_SANDBOXES"):
        return Path(configured)
    return Path("/var/lib/titogym/sandboxes") if os.geteuid() == 0 else home() / "sandboxes"


class LocalBackend:
    """Makes sandboxes below `root`. `labels` are added to those of every sandbox."""

    name = "local"
    own_loopback = False

    def __init__(self, root: Path | str | None = None, labels: Mapping[str, str] | None = None) -> None:
        self.root = Path(root) if root else default_root()
        self.labels = dict(labels or {})
        self.hierarchies: tuple[cgroups.Hierarchy, ...] = ()
        self.storage = StorageWatch(self.root)
        self.destruction = Destruction()
        self._prepared: asyncio.Task[None] | None = None
        self._reaped = Reaped([], {})

    async def create(self, spec: SandboxSpec) -> "LocalSandbox":
        """Raises `UserError` when this machine cannot make sandboxes, `SandboxError` when one fails."""
        recipe = dockerfile.read(spec.image.context) if isinstance(spec.image, Build) else None
        if recipe is not None and recipe.refused:
            raise Unsupported(
                "This image needs a container engine, use the docker or daytona sandbox: "
                f"{'; '.join(recipe.refused)}."
            )
        if isinstance(spec.image, str):
            raise Unsupported(
                f"The local sandbox cannot run {spec.image!r}, it has this machine's programs only: use the "
                "docker or daytona sandbox."
            )
        if spec.services and spec.network == "open":
            raise Unsupported(
                "The local sandbox cannot offer services to a task with an open network, which shares the "
                "ports of this machine: give the task no network."
            )
        await self._ready()
        env = {**recipe.env, **spec.env} if recipe else spec.env
        sandbox = LocalSandbox(self, replace(spec, env=env, labels={**self.labels, **spec.labels}))
        try:
            await sandbox.start()
            if recipe is not None and isinstance(spec.image, Build):
                await dockerfile.carry_out(recipe, spec.image.context, sandbox, spec.image.seconds)
        except BaseException:
            await sandbox.destroy()
            raise
        return sandbox

    @property
    def undestroyed(self) -> dict[str, str]:
        return self.destruction.undestroyed

    async def reap(self) -> Reaped:
        await self._ready()
        first, self._reaped = self._reaped, Reaped([], {})  # what was swept up when this backend started
        done = await asyncio.to_thread(reaper.reap, self.root, self.hierarchies)
        return Reaped([*first.destroyed, *done.destroyed], done.failed)

    async def delete_snapshot(self, snapshot: Snapshot) -> None:
        if snapshot.backend != self.name:
            raise Unsupported(f"{snapshot} is not a snapshot of the local sandbox.")
        name = snapshot.reference
        await self.destruction(name, lambda: asyncio.to_thread(reaper.remove, self.root, (), name))

    async def close(self) -> None:
        await self.destruction.remaining()

    async def _ready(self) -> None:
        if self._prepared is None:
            self._prepared = asyncio.create_task(asyncio.to_thread(self._prepare))
        await asyncio.shield(self._prepared)

    def _prepare(self) -> None:
        """Once per backend: look at the host, make the root, destroy what dead drivers left."""
        bubblewrap.host()
        self.root.mkdir(parents=True, exist_ok=True)
        self.hierarchies = cgroups.detect()
        if _user_of_its_own():
            os.chmod(self.root, 0o711)
            for directory in (self.root, *self.root.resolve().parents):
                if not directory.stat().st_mode & 0o001:
                    raise UserError(
                        f"Sandboxes cannot live in {self.root}: their users may not enter {directory}; "
                        "set TITOGYM_SANDBOXES to a directory that everybody may enter."
                    )
        bubblewrap.probe(_FIRST_USER if _user_of_its_own() else None)
        self._reaped = reaper.reap(self.root, self.hierarchies)
        for name, reason in self._reaped.failed.items():
            log.warning("the leftover sandbox %s could not be destroyed: %s", name, reason)


class LocalSandbox:
    """One sandbox. Its namespaces start when first needed and again after `kill_processes`."""

    def __init__(self, backend: LocalBackend, spec: SandboxSpec) -> None:
        self.id = owners.new_id()
        self.remarks: list[str] = []
        self._backend = backend
        self._spec = spec
        self._read_only: dict[str, Path] = {}  # path inside -> path on the host
        self._staged: dict[Path, Path] = {}
        self._home = backend.root / self.id
        self._root = self._home / "root"
        self._user = _FIRST_USER + secrets.randbelow(_USERS) if _user_of_its_own() else None
        self._group: cgroups.Cgroup | None = None
        self._oom_kills = 0
        self.storage_mb = spec.limits.storage_mb
        self._full = ""
        self._machine: Machine | None = None
        self._serving = doors_of(spec)
        self._doors: list[Door] = []
        self._starting = asyncio.Lock()
        self._destroyed = False

    async def start(self, read_only: Mapping[str, Path | Mapping[str, str]] | None = None) -> None:
        await to_its_end(asyncio.to_thread(self._lay_out, read_only or {}))
        self._backend.storage.add(self)
        await self._running()

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
        arguments = [bubblewrap.host().shell, "-c", command] if isinstance(command, str) else command
        try:
            outcome = await self._run(
                arguments,
                cwd=cwd or self._spec.workdir,
                env={**_BASE_ENV, **environment_of(self._spec), **self._spec.env, **(env or {})},
                stdin=stdin or b"",
                timeout=timeout,
                max_output=max_output,
                on_output=on_output,
            )
        except ValueError as error:  # what the agent asked for cannot be put into a process
            return ExecResult(CANNOT_RUN, "", f"sandbox: {error}\n")
        kills = self._group.oom_kills() if self._group else 0
        oom_killed, self._oom_kills = kills > self._oom_kills, kills
        exit_code = os.waitstatus_to_exitcode(outcome.status)
        if exit_code < 0:
            exit_code = 128 - exit_code
        out_of_memory = oom_killed and exit_code != 0 and not outcome.timed_out
        return ExecResult(
            TIMED_OUT if outcome.timed_out else OUT_OF_MEMORY if out_of_memory else exit_code,
            outcome.stdout.decode(errors="replace"),
            outcome.stderr.decode(errors="replace"),
            timed_out=outcome.timed_out,
            out_of_memory=out_of_memory,
            truncated=outcome.truncated,
            running=outcome.running,
        )

    async def upload(self, source: Path | Mapping[str, str], target: str) -> None:
        archive = await asyncio.to_thread(archives.pack, source, target)
        done = await self.exec(["tar", "-xf", "-", "-C", "/"], cwd="/", stdin=archive)
        if done.exit_code != 0:
            raise SandboxError(f"Could not lay files at {target}: {done.stderr.strip()[-300:]}")

    async def download(self, source: str, target: Path) -> None:
        parent, _, name = source.rstrip("/").rpartition("/")
        done = await self._run(
            ["tar", "-cf", "-", "-C", parent or "/", "--", name],
            cwd="/",
            env=_BASE_ENV,
            stdin=b"",
            timeout=None,
            max_output=self.storage_mb << 20,
        )
        if done.status != 0:
            raise SandboxError(
                f"Could not fetch {source}: {done.stderr.decode(errors='replace').strip()[-300:]}"
            )
        await asyncio.to_thread(archives.unpack, done.stdout, name, target)

    async def read(self, path: str, limit: int) -> bytes | None:
        return await asyncio.to_thread(_read_beneath, self._root, path, limit)

    async def kill_processes(self) -> None:
        for door in self._doors:
            door.close()
        machine, self._machine = self._machine, None
        if machine is not None:
            await to_its_end(machine.kill())

    async def used(self) -> Used:
        return await asyncio.to_thread(used_by, self._root)

    async def over_storage(self, deed: str) -> None:
        """Called by the storage watch: the agent has filled its disk and may do nothing more."""
        self._full = deed
        self.remarks.append(deed)
        await self.kill_processes()

    async def successor(
        self, *, read_only: Mapping[str, Path | Mapping[str, str]], env: Mapping[str, str]
    ) -> "LocalSandbox":
        if self._destroyed:
            raise SandboxError("The sandbox has been destroyed.")
        await self.kill_processes()
        heir = LocalSandbox(
            self._backend, replace(self._spec, image=None, env=dict(env), mounts=(), services={})
        )
        heir._user = self._user  # the files are its
        try:
            heir.remarks += self.remarks
            await to_its_end(asyncio.to_thread(heir._lay_out, read_only, self._root))
            await self.destroy()
            self._backend.storage.add(heir)
            await heir._running()
        except BaseException:
            await heir.destroy()
            raise
        return heir

    async def snapshot(self) -> Snapshot:
        if self._destroyed:
            raise SandboxError("The sandbox has been destroyed.")
        await self.kill_processes()  # nothing may lay links in the way of the copy
        snapshot = Snapshot(self._backend.name, owners.new_id())
        try:
            await to_its_end(asyncio.to_thread(self._keep, self._backend.root / snapshot.reference))
        except BaseException:
            await self._backend.delete_snapshot(snapshot)
            raise
        return snapshot

    def _keep(self, home: Path) -> None:
        home.mkdir(mode=0o700)
        reaper.write_record(home, {**self._spec.labels, "snapshot-of": self.id}, (), self._spec.lifetime)
        (home / "root").mkdir()
        snapshots.copy_entries(self._root, home / "root", None)

    async def destroy(self) -> None:
        self._destroyed = True
        await self._backend.destruction(self.id, self._destroy)

    async def _destroy(self) -> None:
        self._backend.storage.discard(self)
        try:
            await self.kill_processes()
        finally:
            await asyncio.to_thread(reaper.remove, self._backend.root, self._backend.hierarchies, self.id)

    def _lay_out(
        self, read_only: Mapping[str, Path | Mapping[str, str]], inherit: Path | None = None
    ) -> None:
        """Everything on disk, beginning with the directory whose name says who owns it.

        `inherit` is the root directory of a sandbox whose files this one takes over.
        """
        self._home.mkdir(mode=0o711)
        hierarchies = self._backend.hierarchies
        groups = cgroups.directories(hierarchies, self.id)
        reaper.write_record(self._home, self._spec.labels, groups, self._spec.lifetime)
        self._group = cgroups.create(hierarchies, self.id, self._spec.limits)
        bubblewrap.make_system(self._root, network=self._spec.network == "open", user=self._user)
        if isinstance(self._spec.image, Snapshot):
            kept = snapshots.directory(self._backend.root, self._spec.image)
            snapshots.copy_entries(kept, self._root, self._user)
        if inherit is not None:
            _hand_over(inherit, self._root)
        replaced = bubblewrap.complete(self._root, workdir=self._spec.workdir, user=self._user)
        self.remarks += [f"{path} was no longer a directory" for path in replaced]
        for number, (target, tree) in enumerate(read_only.items()):
            copy = self._home / f"mount-{number}"
            archives.copy_tree(tree, copy)
            self._read_only[target] = copy
        for number, mount in enumerate(self._spec.mounts):
            self._show(mount, self._home / f"stage-{number}")

    def _show(self, mount: Mount, stage: Path) -> None:
        source, target = mount.source, mount.target
        if not source.exists():
            raise SandboxError(f"{source} does not exist, so the sandbox cannot show it.")
        if self._user is None:
            self._read_only[target] = source
            return
        needed = stat.S_IROTH | (stat.S_IXOTH if source.is_dir() else 0)
        if source.stat().st_mode & needed != needed:
            raise SandboxError(f"The sandbox's user may not read {source}: run `chmod o+rX {source}`.")
        stage.mkdir() if source.is_dir() else stage.touch()
        self._staged[stage] = source
        self._read_only[target] = stage

    async def _running(self) -> Machine:
        async with self._starting:
            if self._destroyed:
                raise SandboxError("The sandbox has been destroyed.")
            self._refuse_if_full()
            if self._machine is not None and not self._machine.alive:
                await self.kill_processes()
            if self._machine is None:
                limits = bubblewrap.process_limits(
                    self._spec.limits, grouped=self._group.directories if self._group else ()
                )
                self._machine = await Machine.start(
                    self._command,
                    self.id,
                    [*limits, *(f"listen={port}" for port in self._serving)],
                    log=self._home / "log",
                    admit=self._group.add if self._group else lambda pid: None,
                )
                self._doors = [
                    Door(listener, serve)
                    for listener, serve in zip(self._machine.listeners, self._serving.values(), strict=True)
                ]
                for door in self._doors:
                    door.open()
            return self._machine

    def _command(self, inner: list[str], info_fd: int) -> list[str]:
        line = bubblewrap.command(
            self._root,
            [bubblewrap.host().python, *inner],
            info_fd=info_fd,
            network=self._spec.network == "open",
            memory_mb=self._spec.limits.memory_mb,
            read_only=self._read_only,
        )
        return line if self._user is None else bubblewrap.as_user(line, self._user, self._staged)

    async def _run(
        self,
        arguments: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        stdin: bytes,
        timeout: float | None,
        max_output: int,
        on_output: Output | None = None,
    ) -> Outcome:
        machine = await self._running()
        try:
            return await machine.run(
                arguments,
                cwd=cwd,
                env=env,
                stdin=stdin,
                timeout=timeout,
                max_output=max_output,
                on_output=on_output,
            )
        except SandboxError:
            self._refuse_if_full()
            raise

    def _refuse_if_full(self) -> None:
        if self._full:
            raise SandboxError(f"The sandbox was stopped: {self._full}.")


def _user_of_its_own() -> bool:
    """As root of the whole machine each sandbox gets another host user; elsewhere it runs as ours."""
    if os.geteuid() != 0:
        return False
    inside, outside, count = (int(word) for word in Path("/proc/self/uid_map").read_text().split()[:3])
    return inside == outside == 0 and count > _FIRST_USER + _USERS


def _hand_over(old: Path, new: Path) -> None:
    """Move the agent's top-level entries into the fresh root. Those of the system stay behind."""
    for entry in os.listdir(old):
        if entry not in bubblewrap.SYSTEM_ENTRIES:
            _move(old / entry, new / entry)


def _move(source: Path, target: Path) -> None:
    """Rename, though the agent may have taken away the right to write that moving a directory needs."""
    try:
        os.rename(source, target)
    except PermissionError:
        mode = stat.S_IMODE(source.lstat().st_mode)
        os.chmod(source, mode | stat.S_IRWXU)
        os.rename(source, target)
        os.chmod(target, mode)


def _read_beneath(root: Path, path: str, limit: int) -> bytes | None:
    """Read a regular file inside without following a link that the agent may have laid."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(root, flags | os.O_DIRECTORY)
    try:
        for part in path.strip("/").split("/"):
            outer, descriptor = descriptor, os.open(part, flags, dir_fd=descriptor)
            os.close(outer)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return os.read(descriptor, limit)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            return None
        raise
    finally:
        os.close(descriptor)
