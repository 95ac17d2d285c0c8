"""One sandbox at Daytona."""

import asyncio
import base64
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from titogym.cancellation import to_its_end
from titogym.envs.sandboxes import archives
from titogym.envs.sandboxes.base import (
    CANNOT_RUN,
    OUT_OF_MEMORY,
    TIMED_OUT,
    ExecResult,
    Output,
    SandboxError,
    SandboxSpec,
    Snapshot,
)
from titogym.envs.sandboxes.daytona import commands, trust
from titogym.envs.sandboxes.daytona.service import missing

if TYPE_CHECKING:
    from daytona import AsyncSandbox

    from titogym.envs.sandboxes.daytona.backend import DaytonaBackend

T = TypeVar("T")

_REQUEST_SECONDS = 60  # for scripts of our own, beyond what they wait
_KILL_SECONDS = 20.0  # for the end of a command to be seen once it was killed
_KILLED_WINDOW = 1.0
_TRANSFER_SECONDS = 600
_LOGS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")


class DaytonaSandbox:
    """A sandbox that runs at Daytona. `id` is our own, which it bears as a label."""

    def __init__(
        self, backend: "DaytonaBackend", sandbox_id: str, spec: SandboxSpec, remote: "AsyncSandbox"
    ) -> None:
        self.id = sandbox_id
        self.remarks: list[str] = []
        self.spec = spec
        self._backend = backend
        self._service = backend.service
        self._remote = remote
        self._stale: list[str] = []  # directories of commands that have ended
        self._programs: dict[str, str] = {}
        self._system: dict[str, str] = {}
        self._gone = False

    async def prepare(self) -> None:
        """Make the directories that a task may count on, and note what the system is like."""
        await self._script('mkdir -p -- "$@"', "make the work directory", self.spec.workdir, *_LOGS)
        for mount in self.spec.mounts:
            await self.upload(mount.source, mount.target)
        self._programs = await self._digests()
        self._system = trust.listing(await self._script(trust.LISTING, "list the system"))

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
        words = commands.argv(command, {**self.spec.env, **(env or {})})
        if any("\0" in word for word in (*words, cwd or "")):
            return ExecResult(
                CANNOT_RUN, "", "sandbox: a command, directory or variable holds a NUL character\n"
            )
        running = _Command(
            f"/tmp/.titogym-{secrets.token_hex(8)}", secrets.token_hex(16), secrets.token_hex(8)
        )
        window = commands.WINDOW if on_output is None else commands.WINDOW_STREAMED
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        stale, self._stale = self._stale, [running.directory]
        line = commands.begin(
            running.directory,
            running.secret,
            max(0.0, min(window, timeout or math.inf)),
            argv=words,
            cwd=cwd or self.spec.workdir,
            mark=running.mark,
            stdin=await self._input(stdin),
            stale=stale,
        )
        kept = _Kept(max_output, on_output)
        try:
            return await self._follow(running, line, deadline, window, kept)
        except asyncio.CancelledError:
            await to_its_end(self._kill(running))
            raise

    async def upload(self, source: Path | Mapping[str, str], target: str) -> None:
        archive = await asyncio.to_thread(archives.pack, source, target)
        await self._unpack(archive, f"lay files at {target}")

    async def download(self, source: str, target: Path) -> None:
        parent, _, name = source.rstrip("/").rpartition("/")
        archive = f"/tmp/.titogym-{secrets.token_hex(8)}.tar"
        await self._script('tar -cf "$1" -C "$2" -- "$3"', f"fetch {source}", archive, parent or "/", name)
        content = await self._call(
            lambda: self._remote.fs.download_file(archive, _TRANSFER_SECONDS), f"fetch {source}"
        )
        await self._script('rm -f "$1"', f"fetch {source}", archive)
        await asyncio.to_thread(archives.unpack, content or b"", name, target)

    async def read(self, path: str, limit: int) -> bytes | None:
        parts = path.strip("/").split("/")
        outer = ["/" + "/".join(parts[: number + 1]) for number in range(len(parts))]
        script = (
            'for part in "$@"; do [ ! -L "$part" ] || exit 0; done; [ -f "$part" ] || exit 0; '
            f'echo file; head -c {limit} "$part" | base64'
        )
        found = await self._script(script, f"read {path}", *outer)
        kind, _, content = found.partition("\n")
        return base64.b64decode(content) if kind == "file" else None

    async def kill_processes(self) -> None:
        if not self._gone:
            await to_its_end(self._run(commands.kill_all(), "kill what runs in the sandbox"))

    async def successor(
        self, *, read_only: Mapping[str, Path | Mapping[str, str]], env: Mapping[str, str]
    ) -> "DaytonaSandbox":
        """The same remote sandbox: a copy of its file system takes minutes there.

        The agent's processes are dead, the shell is still that of the image, `/logs` and the read-only
        trees are new. Raises `SandboxError` where the agent replaced the shell.
        """
        if self._gone:
            raise SandboxError("The sandbox has been destroyed.")
        await self.kill_processes()
        changed = sorted(
            path for path, digest in (await self._digests()).items() if digest != self._programs.get(path)
        )
        if changed:
            await self.destroy()
            raise SandboxError(
                f"The agent replaced {', '.join(changed)}: nothing that runs in its sandbox can be trusted."
            )
        heir = DaytonaSandbox(
            self._backend, self.id, replace(self.spec, env=dict(env), mounts=(), services={}), self._remote
        )
        heir.remarks += self.remarks
        heir._programs, heir._system = self._programs, self._system
        try:
            system = trust.listing(await heir._script(trust.LISTING, "list the system"))
            heir.remarks += trust.remarks(self._system, system)
            heir.remarks += await heir._renew([*read_only])
            for target, tree in read_only.items():
                await heir._lay_read_only(tree, target)
        except BaseException:
            await self.destroy()
            raise
        self._gone = True  # what it was is the heir's now
        return heir

    async def snapshot(self) -> Snapshot:
        name = f"titogym-{self.id}-{secrets.token_hex(4)}"
        snapshot = Snapshot("daytona", name)
        try:
            await self._call(lambda: self._remote.create_snapshot(name, 600), "keep the file system")
        except BaseException:  # its answer may have been lost
            await self._backend.delete_snapshot(snapshot)
            raise
        return snapshot

    async def destroy(self) -> None:
        if not self._gone:
            self._gone = True
            await self._backend.destruction(self.id, self.delete)

    async def delete(self) -> None:
        """One try at it."""
        try:
            await self._remote.delete(timeout=60, wait=True)
        except Exception as error:
            if not missing(error):
                raise

    # --- commands

    async def _follow(
        self, running: "_Command", line: str, deadline: float, window: float, kept: "_Kept"
    ) -> ExecResult:
        """Send `line`, which starts the command, and wait for its end; kill it at the deadline."""
        end: commands.End | None = None
        killed_at: float | None = None
        while True:
            answer = await self._answer(line, running.secret)
            kept.take(answer)
            end = answer.end
            now = time.monotonic()
            if end is None and killed_at is None and now >= deadline:
                await self._kill(running)
                killed_at = now
            elif end is None and killed_at is not None and now > killed_at + _KILL_SECONDS:
                end = commands.KILLED
            if end is not None and (kept.full or answer.last):
                break  # nothing more is to come, or wanted
            if end is not None:
                left = 0.0
            else:
                left = _KILLED_WINDOW if killed_at is not None else max(0.0, min(window, deadline - now))
            line = commands.follow(running.directory, left, kept.seen)
        out_of_memory = end.oom_kills > 0 and end.status != 0 and killed_at is None
        return ExecResult(
            TIMED_OUT if killed_at is not None else OUT_OF_MEMORY if out_of_memory else end.status,
            kept.stdout.decode(errors="replace"),
            kept.stderr.decode(errors="replace"),
            timed_out=killed_at is not None,
            out_of_memory=out_of_memory,
            truncated=kept.truncated,
            running=end.left,
        )

    async def _answer(self, line: str, secret: str) -> commands.Answer:
        text = await self._run(line, "run a command", seconds=_REQUEST_SECONDS + commands.WINDOW)
        answer = commands.parse(text, secret)
        if answer is None:
            raise SandboxError(f"Daytona could not run a command: the sandbox answered {text[:200]!r}.")
        return answer

    async def _kill(self, command: "_Command") -> None:
        if not self._gone:
            await self._run(commands.kill_command(command.mark), "kill a command")

    async def _input(self, stdin: bytes | None) -> str:
        if not stdin:
            return ""
        path = f"/tmp/.titogym-{secrets.token_hex(8)}.in"
        await self._put(stdin, path)
        return path

    # --- scripts and files of our own

    async def _script(self, text: str, what: str, *words: str) -> str:
        return await self._run(commands.script(text, *words), what)

    async def _run(self, line: str, what: str, *, seconds: float = _REQUEST_SECONDS) -> str:
        """What a short script writes. It may be run twice. Raises `SandboxError` when it fails."""
        done = await self._call(
            lambda: self._remote.process.exec(
                line, cwd="/", env=commands.ENVIRONMENT, timeout=math.ceil(seconds)
            ),
            what,
        )
        if done.exit_code != 0:
            raise SandboxError(
                f"Daytona could not {what}: status {done.exit_code}: {str(done.result).strip()[-300:]}"
            )
        return str(done.result)

    async def _call(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        if self._gone:
            raise SandboxError("The sandbox has been destroyed.")
        return await self._service.patiently(call, what)

    async def _put(self, content: bytes, path: str) -> None:
        await self._call(lambda: self._remote.fs.upload_file(content, path, _TRANSFER_SECONDS), "take a file")

    async def _unpack(self, archive: bytes, what: str) -> None:
        path = f"/tmp/.titogym-{secrets.token_hex(8)}.tar"
        await self._put(archive, path)
        # Where the answer of an earlier try was lost, the archive has gone and its files are there.
        await self._script('[ ! -e "$1" ] || { tar -xf "$1" -C / && rm -f "$1"; }', what, path)

    async def _lay_read_only(self, tree: Path | Mapping[str, str], target: str) -> None:
        archive = await asyncio.to_thread(archives.pack, tree, target, public=True)
        await self._unpack(archive, f"lay the tests at {target}")
        await self._script('chmod -R a-w -- "$1"', f"lay the tests at {target}", target)

    async def _renew(self, targets: list[str]) -> list[str]:
        """Empty `/logs` and the places of the read-only trees; a work directory that is none is replaced."""
        script = (
            'workdir=$1; shift; rm -rf -- /logs "$@"; mkdir -p ' + " ".join(_LOGS) + "; "
            'if [ -L "$workdir" ] || [ ! -d "$workdir" ]; then rm -rf -- "$workdir"; mkdir -p "$workdir"; '
            'echo "$workdir was no longer a directory"; fi'
        )
        said = await self._script(script, "make room for the tests", self.spec.workdir, *targets)
        return said.splitlines()

    async def _digests(self) -> dict[str, str]:
        async def content(path: str) -> tuple[str, bytes | None]:
            try:
                return path, await self._remote.fs.download_file(path)
            except Exception as error:
                if missing(error):
                    return path, None
                raise

        async def contents() -> list[tuple[str, bytes | None]]:
            return list(await asyncio.gather(*map(content, trust.PROGRAMS)))

        return trust.digests(await self._call(contents, "read the shell"))


@dataclass(frozen=True, slots=True)
class _Command:
    """A command that has been started: its directory inside, its secret, the mark of its processes."""

    directory: str
    secret: str
    mark: str


@dataclass(slots=True)
class _Kept:
    """The first `cap` bytes of each stream of a command, and how far each has been read."""

    cap: int
    on_output: Output | None
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    seen: tuple[int, int] = (0, 0)
    truncated: bool = False

    @property
    def full(self) -> bool:
        """Whether neither stream can take more."""
        return min(self.seen) > self.cap

    def take(self, answer: commands.Answer) -> None:
        self._take("stdout", answer.stdout, self.stdout)
        self._take("stderr", answer.stderr, self.stderr)
        out, err = self.seen
        self.seen = (out + len(answer.stdout), err + len(answer.stderr))

    def _take(self, name: Literal["stdout", "stderr"], piece: bytes, into: bytearray) -> None:
        kept = piece[: max(0, self.cap - len(into))]
        self.truncated = self.truncated or len(kept) < len(piece)
        if kept:
            into += kept
            if self.on_output is not None:
                self.on_output(name, kept)
