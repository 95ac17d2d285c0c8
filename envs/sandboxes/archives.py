"""Trees of files on their way into sandboxes and out of them: tar archives, no link followed."""

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

from titogym.envs.sandboxes.base import SandboxError

if TYPE_CHECKING:
    from typing_extensions import Buffer

Tree = Path | Mapping[str, str]


class Chunks(io.RawIOBase):
    """An iterator of pieces as a file to read."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "Buffer") -> int:
        view = memoryview(buffer)
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = piece
        taken = self._rest[: len(view)]
        view[: len(taken)] = taken
        self._rest = self._rest[len(taken) :]
        return len(taken)


def copy_tree(tree: Tree, target: Path) -> None:
    """Copy a tree to a directory that everybody may read and only its owner write."""
    if isinstance(tree, Path):
        try:
            shutil.copytree(tree, target, symlinks=True)
        except shutil.Error as error:
            source, _, reason = error.args[0][0]
            raise SandboxError(f"Could not copy {source}: {reason}") from None
    else:
        for name, text in tree.items():
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    subprocess.run(["chmod", "-R", "u+rwX,go+rX,go-w", str(target)], check=True)


def pack(source: Tree, target: str, *, owner: int = 0, public: bool = False) -> bytes:
    """A tar archive that lays `source` at the absolute path `target`, to belong to the user id `owner`.

    With `public` everybody may read what is in it.
    """
    buffer = io.BytesIO()

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = owner
        member.uname = member.gname = ""
        if public:
            member.mode |= 0o555 if member.isdir() or member.mode & 0o100 else 0o444
        return member

    with tarfile.open(fileobj=buffer, mode="w") as archive:
        if isinstance(source, Path):
            archive.add(source, target.lstrip("/") or ".", filter=anonymous)
        else:
            for name, text in source.items():
                content = text.encode()
                member = tarfile.TarInfo(f"{target.strip('/')}/{name}".lstrip("/"))
                member.size, member.mode, member.mtime = len(content), 0o644, int(time.time())
                archive.addfile(anonymous(member), io.BytesIO(content))
    return buffer.getvalue()


def unpack(archive: bytes | IO[bytes], name: str, target: Path) -> None:
    """Lay the only top-level entry of an archive, which the agent may have made, at `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        try:
            file = io.BytesIO(archive) if isinstance(archive, bytes) else archive
            with tarfile.open(fileobj=file) as members:
                members.extractall(scratch, filter="data")
            os.replace(Path(scratch, name), target)
        except (tarfile.TarError, OSError) as error:
            raise SandboxError(f"Could not lay what was fetched at {target}: {error}") from None
