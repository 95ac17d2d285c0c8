"""Python environments that titogym builds and finds for itself.

SGLang and several harness programs pin versions that clash with each other and with ours, so each
lives in an environment of its own under `$TITOGYM_HOME/venvs/NAME` (default `~/.cache/titogym`).
A stamp holds the digest of what was asked for: the same request is found again, another one rebuilds.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from titogym.errors import UserError

STAMP = ".titogym-stamp"


def home() -> Path:
    """The folder for everything that titogym keeps between runs."""
    return Path(os.environ.get("TITOGYM_HOME") or Path.home() / ".cache" / "titogym")


def ensure(
    name: str,
    installs: Sequence[Sequence[str]],
    *,
    python: str | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Path:
    """Path of the Python interpreter of environment `name`, building it first if it is not there.

    `installs` are argument lists for `pip install`, run in order. Two processes that ask at the same
    time build once: the second waits. Raises `UserError` with pip's last lines when a step fails.
    """
    root = home() / "venvs" / name
    interpreter = root / "bin" / "python"
    wanted = _digest(installs, python)
    with _locked(root.with_name(name + ".lock")):
        if _stamp(root) == wanted and interpreter.exists():
            return interpreter
        shutil.rmtree(root, ignore_errors=True)
        report(f"Setting up the {name} environment in {root} (once; this can take some minutes)")
        _run([python or sys.executable, "-m", "venv", str(root)], name)
        for arguments in installs:
            report("pip install " + " ".join(arguments))
            _run([str(interpreter), "-m", "pip", "install", "--quiet", *arguments], name)
        (root / STAMP).write_text(wanted)
    return interpreter


def _digest(installs: Sequence[Sequence[str]], python: str | None) -> str:
    """Digest of the request: the arguments, and the content of every requirements file among them."""
    digest = hashlib.sha256(repr((python, sys.version_info[:2])).encode())
    for arguments in installs:
        for argument in arguments:
            path = Path(argument)
            is_requirements = path.suffix == ".txt" and path.is_file()
            digest.update(path.read_bytes() if is_requirements else argument.encode())
            digest.update(b"\0")
    return digest.hexdigest()


def _stamp(root: Path) -> str | None:
    try:
        return (root / STAMP).read_text()
    except OSError:
        return None


def _run(command: Sequence[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise UserError(f"Could not build the {name} environment; `{' '.join(command)}` failed:\n{tail}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
