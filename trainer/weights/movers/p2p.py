"""Weights written straight into memory that belongs to each engine, while it goes on generating.

With RDMA that memory is the engine's own. What runs here is the implementation for CPUs: a receiver beside
each engine holds a file in shared memory, we write every tensor to its place in it over TCP, and the engine
loads it from there. A write that fails raises.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil

from titogym.gateway.engines.control import EngineControl
from titogym.trainer.backends.hf_directory import companions
from titogym.trainer.weights.engines import Engines, WeightUpdateError, is_local
from titogym.trainer.weights.layout import contents, layout
from titogym.trainer.weights.plan import plan
from titogym.trainer.weights.prepare import Bucket
from titogym.trainer.weights.receiver import TOKEN
from titogym.trainer.weights.settings import WeightSettings

_PIECE = 8 * 2**20  # bytes of one write
_PREFIX = "titogym-weights-"  # then the owner's process id


class Target(Protocol):
    """Memory of one engine. Every method raises `WeightUpdateError` when it has not done what it says."""

    def open(self, version: str, size: int) -> None:
        """Make room for `size` bytes."""
        ...

    def write(self, offset: int, data: memoryview) -> None:
        """Lay `data` at `offset`; on return it is there."""
        ...

    def commit(self) -> str:
        """All is written: the model directory that the engine loads."""
        ...

    def close(self) -> None: ...


class ReceiverTarget:
    """A `receiver` process of ours."""

    def __init__(self, folder: Path, timeout: float, model_dir: Path | None) -> None:
        token = secrets.token_urlsafe(16)
        self._model_dir = model_dir
        self._child = subprocess.Popen(
            [sys.executable, "-m", "titogym.trainer.weights.receiver", str(folder)],
            stdout=subprocess.PIPE,
            env=os.environ | {TOKEN: token},
        )
        assert self._child.stdout is not None
        port = self._child.stdout.readline().strip()
        if not port:
            raise WeightUpdateError(f"The receiver of weights ended with status {self._child.wait()}")
        self._socket = socket.create_connection(("127.0.0.1", int(port)), timeout)
        self._answers = self._socket.makefile("rb")
        self._socket.sendall(token.encode() + b"\n")

    @property
    def pid(self) -> int:
        return self._child.pid

    def open(self, version: str, size: int) -> None:
        self._ask({"op": "open", "version": version, "size": size})

    def write(self, offset: int, data: memoryview) -> None:
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            head = {"op": "write", "offset": offset + start, "length": len(piece), "crc": zlib.crc32(piece)}
            self._ask(head, piece)

    def commit(self) -> str:
        files: dict[str, str] = {}
        for path in companions(self._model_dir) if self._model_dir else ():
            if path.suffix != ".model":  # a line of JSON carries text alone
                files[path.name] = path.read_text()
        return str(self._ask({"op": "commit", "files": files})["path"])

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()
        self._child.kill()
        self._child.wait()

    def _ask(self, head: dict[str, Any], data: memoryview | None = None) -> dict[str, Any]:
        try:
            self._socket.sendall(json.dumps(head).encode() + b"\n")
            if data is not None:
                self._socket.sendall(data)
            line = self._answers.readline()
        except OSError as error:
            raise WeightUpdateError(f"The receiver of an engine is gone: {error}") from None
        if not line:
            raise WeightUpdateError("The receiver of an engine has ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WeightUpdateError(f"The receiver of an engine refused {head['op']}: {answer['error']}")
        return answer


@dataclass(slots=True)
class _Peer:
    engine: EngineControl
    target: ReceiverTarget
    path: str = ""


class PeerToPeer:
    """A `Mover`. This process is the one source; `plan` says how targets are shared by more."""

    def __init__(self, engines: Engines, settings: WeightSettings) -> None:
        self._engines = engines
        self._settings = settings
        self._folder: Path | None = None
        self._peers: list[_Peer] = []

    def connect(self) -> None:
        for engine in self._engines.controls:
            if not is_local(engine.url):
                raise WeightUpdateError(
                    f"{engine.url} is on another machine, which the mover p2p reaches only with RDMA: "
                    "choose the mover broadcast or disk"
                )
        self._engines.every(lambda engine: engine.info())
        shared = Path("/dev/shm")
        root = shared if shared.is_dir() else Path(tempfile.gettempdir())
        _sweep(root)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
        for number, engine in enumerate(self._engines.controls):
            target = ReceiverTarget(
                self._folder / str(number), self._settings.timeout, self._settings.model_dir
            )
            self._peers.append(_Peer(engine, target))

    def stage(self, buckets: Sequence[Bucket], version: str) -> dict[str, float]:
        if not self._peers:
            raise WeightUpdateError("The engines are not connected: connect first")
        wanted = layout(buckets)
        parts = [(0, memoryview(wanted.header))]
        parts += [(wanted.entries[name].start, data.data) for name, data in contents(buckets)]
        transfers = [self._peers[transfer.target] for transfer in plan(1, len(self._peers))]
        calls = [
            self._engines.beside(partial(_send, peer, version, wanted.size, parts)) for peer in transfers
        ]
        self._engines.finish(calls)
        return {"publish/bytes": float(wanted.size * len(transfers))}

    def activate(self, buckets: Sequence[Bucket], version: str, flush_cache: bool) -> None:
        paths = {peer.engine.url: peer.path for peer in self._peers}
        self._engines.every(
            lambda engine: engine.update_from_disk(paths[engine.url], version, flush_cache=flush_cache)
        )

    def close(self) -> None:
        for peer in self._peers:
            peer.target.close()
        self._peers.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _send(peer: _Peer, version: str, size: int, parts: Iterable[tuple[int, memoryview]]) -> None:
    peer.target.open(version, size)
    for offset, data in parts:
        peer.target.write(offset, data)
    peer.path = peer.target.commit()


def _sweep(root: Path) -> None:
    """Free the memory of runs that were killed: shared memory outlives its processes."""
    for folder in root.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)
