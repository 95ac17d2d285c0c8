"""Weight versions in a directory: each one whole, or as what changed since its parent.

    ROOT/publisher.lock     held by the one process that publishes here
    ROOT/<version>/         weights.bin, then index.json: a version without an index does not exist

`weights.bin` is a safetensors file (whole) or one compressed delta per changed tensor after another. The
index names the parent and its checksum, the checksum of the result, and for every tensor its digest, its
encoding and where its bytes lie. Files are on disk before the index is renamed into place.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from titogym.trainer.backends.hf_directory import companions
from titogym.trainer.backends.versions import flush_directory
from titogym.trainer.weights.delta import Bytes, DeltaError, Encoding, apply, encode
from titogym.trainer.weights.engines import WeightUpdateError
from titogym.trainer.weights.layout import Layout, checksum, contents, digest, layout
from titogym.trainer.weights.prepare import Bucket

INDEX, WEIGHTS, FORMAT = "index.json", "weights.bin", 1
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]*")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one tensor's bytes lie in `weights.bin`. `same` has none; `whole` has all, uncompressed."""

    digest: str
    encoding: Literal["same", "whole", "xor", "overwrite"]
    offset: int = 0
    length: int = 0


@dataclass(frozen=True, slots=True)
class Index:
    """What `index.json` says. A version without parent is whole."""

    version: str
    parent: str | None
    parent_checksum: str | None
    checksum: str
    header: str  # of the resulting safetensors file, in Latin-1
    tensors: dict[str, Stored]
    changed_bytes: int = 0

    @classmethod
    def read(cls, folder: Path) -> "Index":
        """Raises `WeightUpdateError` for a version that is not there or is of another format."""
        try:
            found: dict[str, Any] = json.loads((folder / INDEX).read_text())
            if found.pop("format") != FORMAT:
                raise WeightUpdateError(f"{folder} was written by another version of titogym")
            tensors = {name: Stored(**one) for name, one in found.pop("tensors").items()}
            return cls(tensors=tensors, **found)
        except FileNotFoundError:
            raise WeightUpdateError(f"There is no weight version in {folder}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise WeightUpdateError(f"{folder / INDEX} is damaged: {error}") from None

    def write(self, folder: Path) -> None:
        tensors = {
            name: {"digest": s.digest, "encoding": s.encoding, "offset": s.offset, "length": s.length}
            for name, s in self.tensors.items()
        }
        body = {
            "format": FORMAT,
            "version": self.version,
            "parent": self.parent,
            "parent_checksum": self.parent_checksum,
            "checksum": self.checksum,
            "header": self.header,
            "changed_bytes": self.changed_bytes,
            "tensors": tensors,
        }
        partial = folder / f".{INDEX}"
        _write_durably(partial, [json.dumps(body).encode()])
        partial.rename(folder / INDEX)
        flush_directory(folder)
        flush_directory(folder.parent)


@dataclass(frozen=True, slots=True)
class Published:
    """What one version cost: bytes written, bytes that differ from the parent, bytes of all weights."""

    written: int
    changed: int
    total: int


class VersionPublisher:
    """Writes versions under `root`, each as the difference to the one before.

    A second publisher on the same root is refused; so is a version that is there with other contents. The
    same version with the same contents again is fine and writes nothing. Keeps a copy of the weights.
    """

    def __init__(self, root: Path, encoding: Encoding, rebase_every: int) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root, self._encoding, self._rebase_every = root, encoding, rebase_every
        self._lock = (root / "publisher.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise WeightUpdateError(
                f"Another process publishes weights in {root}: give this run a directory of its own"
            ) from None
        self._last: Index | None = None
        self._data: dict[str, Bytes] = {}
        self._chain = 0  # deltas since the last whole version

    def publish(self, buckets: Sequence[Bucket], version: str) -> Published:
        """Write `version`. Raises `WeightUpdateError`; then no such version exists, and it can be retried."""
        if not _VERSION.fullmatch(version):
            raise WeightUpdateError(f"{version!r} cannot name a weight version's directory")
        plan = layout(buckets)
        data = dict(contents(buckets))
        digests = {name: digest(part) for name, part in data.items()}
        result = checksum(digests, plan.header)
        folder = self._root / version
        total = plan.size
        if (folder / INDEX).exists():
            if Index.read(folder).checksum != result:
                raise WeightUpdateError(f"Version {version} is already published in {self._root} with others")
            return Published(0, 0, total)
        shutil.rmtree(folder, ignore_errors=True)  # of a publisher that died: we hold the lock
        folder.mkdir()
        last = self._last
        whole = (
            last is None or self._chain >= self._rebase_every or last.header.encode("latin-1") != plan.header
        )
        if whole:
            index, written = self._write_whole(folder, version, plan, data, digests, result)
        else:
            assert last is not None
            index, written = self._write_delta(folder, version, plan, data, digests, result, last)
        index.write(folder)
        self._last, self._chain = index, 0 if whole else self._chain + 1
        self._data = {name: part.copy() for name, part in data.items()}
        if whole:
            self._drop_older(folder)
        return Published(written, index.changed_bytes, total)

    def close(self) -> None:
        self._lock.close()

    def _write_whole(
        self,
        folder: Path,
        version: str,
        plan: Layout,
        data: dict[str, Bytes],
        digests: dict[str, str],
        result: str,
    ) -> tuple[Index, int]:
        order = sorted(plan.entries, key=lambda name: plan.entries[name].start)
        written = _write_durably(folder / WEIGHTS, [plan.header, *(data[name] for name in order)])
        tensors = {
            name: Stored(digests[name], "whole", entry.start, entry.end - entry.start)
            for name, entry in plan.entries.items()
        }
        header = plan.header.decode("latin-1")
        return Index(version, None, None, result, header, tensors, plan.size - len(plan.header)), written

    def _write_delta(
        self,
        folder: Path,
        version: str,
        plan: Layout,
        data: dict[str, Bytes],
        digests: dict[str, str],
        result: str,
        last: Index,
    ) -> tuple[Index, int]:
        tensors, parts, at, changed = {}, [], 0, 0
        for name, entry in plan.entries.items():
            if digests[name] == last.tensors[name].digest:
                tensors[name] = Stored(digests[name], "same")
                continue
            old, new = self._data[name], data[name]
            part = encode(old, new, entry.item_size, self._encoding)
            tensors[name] = Stored(digests[name], self._encoding, at, len(part))
            parts.append(part)
            at += len(part)
            changed += int(np.count_nonzero(old != new))
        _write_durably(folder / WEIGHTS, parts)
        index = Index(version, last.version, last.checksum, result, last.header, tensors, changed)
        return index, at

    def _drop_older(self, newest: Path) -> None:
        """Keep the newest whole version and, for receivers that lag, the chain before it."""
        complete = [f for f in self._root.iterdir() if (f / INDEX).exists() and f != newest]
        whole = [f for f in complete if Index.read(f).parent is None]
        before = max(whole, key=lambda f: (f / INDEX).stat().st_mtime_ns, default=None)
        if before is None:
            return
        limit = (before / INDEX).stat().st_mtime_ns
        for folder in complete:
            if (folder / INDEX).stat().st_mtime_ns < limit:
                shutil.rmtree(folder, ignore_errors=True)


class Replica:
    """A receiver's copy: `folder/<version>/model.safetensors`, verified, beside the model's other files."""

    def __init__(self, folder: Path, model_dir: Path | None = None) -> None:
        self._folder, self._model_dir = folder, model_dir
        self._held: str | None = None
        self._checksum: str | None = None

    def advance(self, root: Path, version: str) -> Path:
        """Bring the copy to `version` of what is published under `root`; its model directory.

        What is read is verified: that each delta stands on exactly what is held, and every tensor and the
        whole of the result. Raises `WeightUpdateError` naming what does not fit, and holds what it held.
        """
        if self._held == version:
            return self._folder / version
        chain = self._chain(root, version)
        target = self._folder / version
        partial = self._folder / f".{version}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        file = partial / "model.safetensors"
        if chain[0][1].parent is None:
            shutil.copyfile(chain[0][0] / WEIGHTS, file)
        else:
            assert self._held is not None
            shutil.copyfile(self._folder / self._held / "model.safetensors", file)
        for folder, index in chain:
            self._patch(file, folder, index)
        self._verify(file, chain[-1][1])
        for extra in companions(self._model_dir) if self._model_dir else ():
            shutil.copyfile(extra, partial / extra.name)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        self._drop_but(target, self._held)
        self._held, self._checksum = version, chain[-1][1].checksum
        return target

    def _chain(self, root: Path, version: str) -> list[tuple[Path, Index]]:
        """The versions to go through, oldest first, from what is held or from a whole one."""
        chain: list[tuple[Path, Index]] = []
        wanted, expected = version, None
        while True:
            folder = root / wanted
            index = Index.read(folder)
            if expected is not None and index.checksum != expected:
                raise WeightUpdateError(
                    f"{root}: version {chain[-1][1].version} stands on another version {wanted} than is there"
                )
            chain.append((folder, index))
            if index.parent is None:
                break
            if index.parent == self._held and index.parent_checksum == self._checksum:
                break
            wanted, expected = index.parent, index.parent_checksum
        return chain[::-1]

    def _patch(self, file: Path, folder: Path, index: Index) -> None:
        if index.parent is None:
            return
        places = entries(index.header.encode("latin-1"))
        target = np.memmap(file, np.uint8, mode="r+")
        with (folder / WEIGHTS).open("rb") as source:
            for name, stored in index.tensors.items():
                if stored.encoding == "same":
                    continue
                source.seek(stored.offset)
                start, end, item_size = places[name]
                try:
                    part = source.read(stored.length)
                    apply(part, target[start:end], item_size, cast(Encoding, stored.encoding))
                except DeltaError as error:
                    raise WeightUpdateError(f"{folder}: tensor {name}: {error}") from None
        target.flush()

    def _verify(self, file: Path, index: Index) -> None:
        found = np.memmap(file, np.uint8, mode="r")
        header = index.header.encode("latin-1")
        places = entries(header)
        for name, stored in index.tensors.items():
            start, end, _ = places[name]
            if digest(found[start:end]) != stored.digest:
                raise WeightUpdateError(f"Version {index.version}: tensor {name} is not what was published")
        digests = {name: stored.digest for name, stored in index.tensors.items()}
        if bytes(found[: len(header)]) != header or checksum(digests, header) != index.checksum:
            raise WeightUpdateError(
                f"Version {index.version} is not what was published: its checksum differs"
            )

    def _drop_but(self, *kept: "Path | str | None") -> None:
        names = {Path(one).name for one in kept if one is not None}
        for folder in self._folder.iterdir():
            if folder.is_dir() and folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)


def entries(header: bytes) -> dict[str, tuple[int, int, int]]:
    """Start, end and element size of every tensor of the safetensors file that begins with `header`."""
    found: dict[str, Any] = json.loads(header[8:])
    found.pop("__metadata__", None)
    made = {}
    for name, one in found.items():
        start, end = one["data_offsets"]
        count = int(np.prod(one["shape"], dtype=np.int64))
        made[name] = (start + len(header), end + len(header), (end - start) // count if count else 1)
    return made


def _write_durably(path: Path, parts: Sequence["bytes | Bytes"]) -> int:
    """Write `parts` one after another and wait until they are on disk; their bytes."""
    written = 0
    try:
        with path.open("wb") as file:
            for part in parts:
                written += file.write(part if isinstance(part, bytes) else part.data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise WeightUpdateError(f"Weights could not be written to {path}: {error.strerror}") from None
    return written
