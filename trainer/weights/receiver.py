"""The receiving end of the p2p mover on a CPU: memory that a peer writes into. Needs no torch.

    python -m titogym.trainer.weights.receiver DIRECTORY

Prints its port on loopback. One connection is served at a time; its first line is the token from the
environment variable TITOGYM_RECEIVER_TOKEN. Then come requests: a line of JSON, for a write followed by its
bytes, each answered by a line of JSON, `{"path": ...}` or `{"error": ...}`:

    {"op": "open", "version": V, "size": N}           room for a file of N bytes
    {"op": "write", "offset": O, "length": L, "crc": C}
    {"op": "commit", "files": {NAME: TEXT}}           the file is whole: `path` is its model directory
"""

import hmac
import json
import mmap
import os
import re
import shutil
import socketserver
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titogym.processes import die_with_parent

TOKEN = "TITOGYM_RECEIVER_TOKEN"
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]*")
_LINE = 1 << 26  # most bytes of one line; a tokenizer travels in one


class Refused(Exception):
    """A request that does not fit; the message says why."""


class Memory:
    """One version being written, and the last two that were, as model directories in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._partial = folder / ".partial"
        self._version = ""
        self._map: mmap.mmap | None = None
        self._missing = 0

    def open(self, version: str, size: int) -> None:
        if not _NAME.fullmatch(version) or size < 1:
            raise Refused(f"no version {version!r} of {size} bytes")
        self._map = None
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        with (self._partial / "model.safetensors").open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # now, rather than SIGBUS at a write
            self._map = mmap.mmap(file.fileno(), size)
        self._version, self._missing = version, size

    def write(self, offset: int, crc: int, data: bytes) -> None:
        if self._map is None or not 0 <= offset <= len(self._map) - len(data):
            raise Refused(f"a write of {len(data)} bytes at {offset} is outside of what was opened")
        if zlib.crc32(data) != crc:
            raise Refused(f"the {len(data)} bytes at {offset} were damaged on their way")
        self._map[offset : offset + len(data)] = data
        self._missing -= len(data)

    def commit(self, files: dict[str, str]) -> Path:
        if self._map is None or self._missing:
            raise Refused(f"version {self._version!r} is not whole: {self._missing} bytes are missing")
        for name, text in files.items():
            if not _NAME.fullmatch(name) or name == "model.safetensors":
                raise Refused(f"no file may be called {name!r}")
            (self._partial / name).write_text(text)
        self._map = None
        target = self._folder / self._version
        shutil.rmtree(target, ignore_errors=True)
        self._partial.rename(target)
        older = sorted((f for f in self._folder.iterdir() if f != target), key=lambda f: f.stat().st_mtime_ns)
        for folder in older[:-1]:  # an engine may still read the one before
            shutil.rmtree(folder, ignore_errors=True)
        return target


class _Server(socketserver.TCPServer):
    memory: Memory
    token: str


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        said = self.rfile.readline(200).strip()
        if not hmac.compare_digest(said, self.server.token.encode()):
            return
        memory = self.server.memory
        calls: dict[str, Callable[[dict[str, Any]], Path | None]] = {
            "open": lambda ask: memory.open(ask["version"], ask["size"]),
            "write": lambda ask: memory.write(ask["offset"], ask["crc"], self.rfile.read(ask["length"])),
            "commit": lambda ask: memory.commit(ask["files"]),
        }
        while line := self.rfile.readline(_LINE):
            answer: dict[str, str] = {}
            try:
                ask = json.loads(line)
                path = calls[ask["op"]](ask)
                answer = {"path": str(path)} if path else {}
            except Refused as error:
                answer = {"error": str(error)}
            except OSError as error:
                answer = {"error": f"{error.strerror or error}"}
            self.wfile.write(json.dumps(answer).encode() + b"\n")


def main(folder: Path) -> None:
    die_with_parent()
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.memory, server.token = Memory(folder), os.environ[TOKEN]
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
