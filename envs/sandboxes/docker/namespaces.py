"""Loopback ports inside a container, made from outside: no program in it has a part in them.

A thread enters the container's network namespace, opens the listening sockets and ends. That takes the
rights of root on the machine of the engine.
"""

import ctypes
import os
import socket
import threading
from collections.abc import Iterable

from titogym.envs.sandboxes.base import SandboxError, Unsupported

_CLONE_NEWNET = 0x40000000
_BACKLOG = 128


def listen_inside(pid: int, ports: Iterable[int]) -> list[socket.socket]:
    """Sockets that listen on these loopback ports of the network namespace of process `pid`.

    Raises `Unsupported` where this process may not enter it.
    """
    made: list[socket.socket] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            _enter(pid)
            for port in ports:
                listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
                made.append(listener)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", port))
                listener.listen(_BACKLOG)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="network-namespace")  # which is never used again
    thread.start()
    thread.join()
    if failure:
        for listener in made:
            listener.close()
        if isinstance(failure[0], PermissionError | FileNotFoundError):
            raise Unsupported("Only root, in the pid namespace of the engine, may enter a sandbox's network.")
        raise SandboxError(f"The sandbox's ports could not be opened: {failure[0]}")
    return made


def _enter(pid: int) -> None:
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(namespace)
