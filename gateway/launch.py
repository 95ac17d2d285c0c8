"""Starting a gateway process of one's own, as `titogym run` and `titogym train` do."""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from sys import executable
from urllib.parse import urlsplit

import httpx

from titogym.processes import Child, spawn

_ADDRESS = re.compile(r"^Gateway at (http://\S+),", re.MULTILINE)
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where a gateway listens, and the key that opens its admin routes."""

    url: str
    admin_key: str


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    """A running gateway that dies with this process. `admin_key` opens its admin routes."""

    url: str
    admin_key: str
    child: Child

    @property
    def address(self) -> Address:
        return Address(self.url, self.admin_key)

    def alive(self) -> bool:
        return self.child.alive()

    def ending(self) -> str:
        return self.child.ending()

    def stop(self) -> None:
        self.child.stop()


def launch(
    engines: Sequence[str],
    model_dir: Path,
    *,
    directory: Path,
    family: str | None = None,
    options: Sequence[str] = (),
    replacing: Address | None = None,
) -> GatewayProcess:
    """Start `titogym serve` on a free port, with a fresh admin key; journal and log go to `directory`.

    One that replaces another, which has died, gets its port, its key and, by the same `directory`, its
    sessions. `options` are further arguments of `titogym serve`. Call from the main thread. Raises
    `UserError` with the end of its log when it does not start.
    """
    key = replacing.admin_key if replacing else secrets.token_urlsafe(24)
    port = urlsplit(replacing.url).port if replacing else 0
    log = directory / "gateway.log"
    command = [executable, "-m", "titogym", "serve", "--port", str(port), "--model-dir", str(model_dir)]
    command += [word for url in engines for word in ("--engine", url)]
    command += ["--journal", str(directory / "gateway.sqlite")]
    command += ["--family", family] if family else []
    log.unlink(missing_ok=True)
    child = spawn("gateway", [*command, *options], log=log, env={"TITOGYM_ADMIN_KEY": key})
    child.wait_ready(lambda: _answers(log), _START_SECONDS, interval=0.05)
    return GatewayProcess(_address(log) or "", key, child)


def _answers(log: Path) -> bool:
    url = _address(log)
    if url is None:
        return False
    try:
        return httpx.get(url + "/health", trust_env=False).is_success
    except httpx.HTTPError:
        return False


def _address(log: Path) -> str | None:
    """Where the gateway says that it listens."""
    found = _ADDRESS.search(log.read_text(errors="replace")) if log.exists() else None
    return found[1] if found else None
