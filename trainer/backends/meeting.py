"""How a trainer's ranks on other machines meet the driver and one another: TCP, behind a key.

What crosses a connection is pickled, so nothing is read from anybody who has not shown that they know the
key; that is what `multiprocessing.connection` does, too, with a challenge in each direction.
"""

import os
import queue
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Literal
from urllib.parse import urlsplit

_PATIENCE = 10  # seconds for the other end to prove itself
# A machine that vanishes says nothing: after 60 s without a sign of it, its connections are closed.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
# What a stranger may cause while it is being let in; `answer_challenge` asserts.
NOT_LET_IN = (OSError, EOFError, AuthenticationError, AssertionError)

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message over a connection: which rank it is, and what it wants."""

    line: Literal["life", "calls"]  # `life` carries nothing but its own end; `calls` the driver's calls
    rank: int
    world: int
    host: str
    pid: int
    team: Address | None = None  # of rank 0: where the other ranks get their calls

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def parse_address(text: str) -> Address:
    """`HOST:PORT`, or `[HOST]:PORT` for IPv6. Raises `ValueError` for anything else."""
    parts = urlsplit(f"//{text}")
    if not parts.hostname or not parts.port or text != parts.netloc or "@" in text:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return parts.hostname, parts.port


def format_address(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Door:
    """Listens at an address and lets in those who know the key. Strangers disturb nobody but themselves."""

    def __init__(self, address: Address, key: bytes) -> None:
        """Raises `OSError` when this machine cannot listen there. Port 0: a free one; no host: every one."""
        host = address[0]
        both = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
        self._socket = socket.create_server(address, family=family, backlog=128, dualstack_ipv6=both)
        self._key = key
        self.address: Address = host, self._socket.getsockname()[1]
        self.arrivals: queue.SimpleQueue[tuple[Hello, Connection]] = queue.SimpleQueue()
        threading.Thread(target=self._open, daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more. Connections that were made stay."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which wakes the thread; closing alone does not
        self._socket.close()

    def _open(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._let_in, args=(peer,), daemon=True).start()

    def _let_in(self, peer: socket.socket) -> None:
        with suppress(*NOT_LET_IN), peer:
            connection = _connection(peer)
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            hello: Hello = connection.recv()
            _wait_at_most(peer, 0)
            self.arrivals.put((hello, connection))


def connect(address: Address, key: bytes, hello: Hello) -> Connection:
    """Go through the door at `address`. Raises one of `NOT_LET_IN`, for another key `AuthenticationError`."""
    with socket.create_connection(address, timeout=_PATIENCE) as peer:
        connection = _connection(peer)
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send(hello)
        _wait_at_most(peer, 0)
    return connection


def _connection(peer: socket.socket) -> Connection:
    peer.settimeout(None)  # a `Connection` needs a descriptor that blocks
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        peer.setsockopt(socket.IPPROTO_TCP, option, value)
    _wait_at_most(peer, _PATIENCE)
    return Connection(os.dup(peer.fileno()))


def _wait_at_most(peer: socket.socket, seconds: int) -> None:
    """For one read or write; 0: for ever."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))
