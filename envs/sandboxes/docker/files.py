"""Files of a container from outside, by the engine's archives: no process inside has a part in it."""

import base64
import json
import tarfile
from pathlib import PurePosixPath
from typing import IO, Any

from titogym.envs.sandboxes import archives
from titogym.envs.sandboxes.base import SandboxError
from titogym.envs.sandboxes.docker.engine import Engine, EngineError

_STAT = "X-Docker-Container-Path-Stat"
# Go's bits of a file's kind. None of them: a regular file.
_DIRECTORY, _LINK = 1 << 31, 1 << 27
_KINDS = _DIRECTORY | _LINK | 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "nix")
# Written by the engine itself.
_ENGINES = frozenset({"/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab"})
_ENGINES |= {"/sbin/docker-init", "/usr/sbin/docker-init", "/dev/init", "/run/podman-init"}
_CHANGES = ("changed", "added", "deleted")
_NAMED = 8  # most changed files that a remark names


async def put(engine: Engine, container: str, archive: bytes, target: str) -> None:
    """Unpack an archive of absolute paths. Links inside are followed, but never out of the container."""
    try:
        await engine.long_call(engine.api.put_archive, container, "/", archive)
    except EngineError as error:
        raise SandboxError(f"Could not lay files at {target}: {error}") from error


async def get(engine: Engine, container: str, source: str, sink: IO[bytes], most: int) -> str:
    """Write the archive of one file or directory to `sink`; returns the name that it has in there."""

    def fetch() -> str:
        chunks, stat = engine.api.get_archive(container, source.rstrip("/") or "/")
        size = 0
        for chunk in chunks:
            size += len(chunk)
            if size > most:
                raise SandboxError(f"Could not fetch {source}: it is larger than the sandbox's storage.")
            sink.write(chunk)
        return str(stat["name"])

    try:
        return await engine.long_call(fetch)
    except EngineError as error:
        raise SandboxError(f"Could not fetch {source}: {error}") from error


async def read(engine: Engine, container: str, path: str, limit: int) -> bytes | None:
    """At most `limit` bytes of a regular file; None where there is none, or a link on the way to it."""

    def look() -> bytes | None:
        parts = PurePosixPath(path)
        for parent in reversed(parts.parents):
            mode = _mode(engine.api, container, str(parent))
            if mode is None or mode & _KINDS != _DIRECTORY:
                return None
        mode = _mode(engine.api, container, str(parts))
        if mode is None or mode & _KINDS:
            return None
        chunks, _ = engine.api.get_archive(container, str(parts))
        try:
            with tarfile.open(fileobj=archives.Chunks(chunks), mode="r|") as members:
                member = members.next()
                content = members.extractfile(member) if member is not None and member.isreg() else None
                return content.read(limit) if content is not None else None
        finally:
            chunks.close()

    try:
        return await engine.call(look)
    except EngineError as error:
        if error.status == 404:
            return None
        raise


async def changes_of_the_system(engine: Engine, container: str, search: str) -> list[str]:
    """What a verifier should know: the files of the system that the agent changed. One sentence, or none.

    The directories of `search`, the image's PATH, are the system's too: a virtual environment's, say.
    """
    programs = {str(PurePosixPath(part)) for part in search.split(":") if part.startswith("/")}
    ways = {str(way) for part in programs for way in (PurePosixPath(part), *PurePosixPath(part).parents)}
    found = await engine.call(engine.api.diff, container) or []
    changed = {entry["Path"]: _CHANGES[entry["Kind"]] for entry in found}
    parents = {str(parent) for path in {*changed, *_ENGINES} for parent in PurePosixPath(path).parents}
    ours = [
        f"{path} ({kind})"
        for path, kind in sorted(changed.items())
        if path not in parents
        and path not in _ENGINES
        and (
            PurePosixPath(path).parts[1] in _SYSTEM
            or path in ways
            or str(PurePosixPath(path).parent) in programs
        )
        and not ("/__pycache__/" in path and path.endswith(".pyc"))  # which no verifier reads
    ]
    if not ours:
        return []
    more = f" and {len(ours) - _NAMED} more" if len(ours) > _NAMED else ""
    return [f"the agent changed system files: {', '.join(ours[:_NAMED])}{more}"]


async def own_volumes(engine: Engine, container: str) -> list[str]:
    """The directories that the container's image keeps in volumes (VOLUME), which no commit holds.

    Not those of the system, nor `/logs`.
    """
    found = await engine.call(engine.api.inspect_container, container)
    return sorted(
        mount["Destination"]
        for mount in found["Mounts"]
        if mount["Type"] == "volume"
        and mount["RW"]
        and mount["Destination"] != "/logs"
        and PurePosixPath(mount["Destination"]).parts[1] not in _SYSTEM
    )


def _mode(api: Any, container: str, path: str) -> int | None:
    """Go's mode bits of what is at `path`, a link there not followed. None where nothing is."""
    answer = api.head(
        api._url("/containers/{0}/archive", container), params={"path": path}, timeout=api.timeout
    )
    if answer.status_code == 404:
        return None
    answer.raise_for_status()
    return int(json.loads(base64.b64decode(answer.headers[_STAT]))["mode"])
