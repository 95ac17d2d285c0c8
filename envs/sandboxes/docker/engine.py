"""The container engine behind the `docker` SDK: where it is, calls to it, its errors.

The SDK blocks, so its calls run in threads: a few for the short ones, which take milliseconds, and a few
of their own for those that take long (pull, build, commit), so that neither starves the other however
many sandboxes there are. The output of commands needs no thread (see `commands`).
"""

import asyncio
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from titogym.envs.sandboxes.base import SandboxError
from titogym.errors import UserError, install_extra

P = ParamSpec("P")
T = TypeVar("T")

SHORT_CALLS, LONG_CALLS = 16, 4  # threads
CALL_SECONDS = 120  # an engine that is silent for this long is taken for dead
_SOCKETS = ("/var/run/docker.sock", "/run/podman/podman.sock")


class EngineError(SandboxError):
    """The engine refused or failed. `status` is that of its HTTP answer, None where none came."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status


class Engine:
    """A connection to one engine. `here` says whether it runs on this machine and sees its files."""

    def __init__(self, address: str | None) -> None:
        self.address = address or find_engine()
        self.here = self.address.startswith("unix:")
        self.api = self.connect()
        self._short = ThreadPoolExecutor(SHORT_CALLS, "docker")
        self._long = ThreadPoolExecutor(LONG_CALLS, "docker-long")

    def connect(self) -> Any:
        """A client of its own. Blocks. Raises `UserError` where no engine answers."""
        return _connect(self.address)

    async def call(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`method(...)` of the SDK in a thread. Raises `EngineError`."""
        return await self._run(self._short, method, *args, **kwargs)

    async def long_call(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same for what takes seconds or minutes."""
        return await self._run(self._long, method, *args, **kwargs)

    def close(self) -> None:
        self._short.shutdown(wait=False)
        self._long.shutdown(wait=False)
        self.api.close()

    async def _run(
        self, pool: ThreadPoolExecutor, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, lambda: translated(method, *args, **kwargs))


def translated(method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`method(...)` with the SDK's errors and its HTTP client's as `EngineError`."""
    import requests
    import urllib3
    from docker import errors

    try:
        return method(*args, **kwargs)
    except errors.APIError as error:
        raise EngineError(str(error.explanation or error), error.status_code) from error
    except (
        errors.DockerException,
        requests.RequestException,
        urllib3.exceptions.HTTPError,
        OSError,
    ) as error:
        raise EngineError(f"the container engine does not answer: {error}", None) from error


def find_engine() -> str:
    """Where the engine is: $DOCKER_HOST, $CONTAINER_HOST, else the socket of Docker or Podman."""
    for name in ("DOCKER_HOST", "CONTAINER_HOST"):
        if address := os.environ.get(name):
            return address
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    for path in (*_SOCKETS, f"{runtime}/docker.sock", f"{runtime}/podman/podman.sock"):
        if _is_socket(path):
            return f"unix://{path}"
    raise UserError(
        "There is no container engine: start Docker (`sudo systemctl start docker`) or Podman's socket "
        "(`systemctl --user start podman.socket`), or set DOCKER_HOST to where one listens."
    )


def _connect(address: str) -> Any:
    try:
        import docker
        from docker import errors, utils
    except ImportError:
        raise UserError(f"The docker sandbox needs the docker package: {install_extra('docker')}.") from None
    try:
        given = {**utils.kwargs_from_env(), "base_url": address}
        return docker.APIClient(version="auto", timeout=CALL_SECONDS, **given)
    except errors.DockerException as error:
        raise UserError(
            f"No container engine answers at {address} ({error}): start it, set DOCKER_HOST to where it "
            "listens, and see that you may use it (for Docker: be in the group `docker`)."
        ) from error


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(Path(path).stat().st_mode)
    except OSError:
        return False
