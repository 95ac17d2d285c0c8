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
    uv: bool = False,
    imports: Sequence[str] = (),
    report: Callable[[str], None] = lambda line: None,
) -> Path:
    """Path of the Python interpreter of environment `name`, building it first if it is not there.

    `installs` are argument lists for `pip install`, run in order. With `uv`, the installer of that name
    does it in a tenth of the time where it is found; pip follows where uv fails, for it knows settings
    that uv does not read. `imports` are then imported once, so that what they load is compiled. Two
    processes that ask at the same time build once: the second waits. Raises `UserError` with pip's last
    lines when a step fails.
    """
    root = home() / "venvs" / name
    interpreter = root / "bin" / "python"

    def build() -> None:
        report(f"Setting up the {name} environment in {root} (once; this can take some minutes)")
        if not (uv and _with_uv(root, installs, python or sys.executable)):
            shutil.rmtree(root, ignore_errors=True)
            _with_pip(root, installs, python or sys.executable, report)
        if imports:
            _compile(interpreter, imports)

    once(root, _digest(installs, python), build, proof=interpreter)
    return interpreter


def once(root: Path, wanted: str, build: Callable[[], None], *, proof: Path) -> None:
    """See that `root` holds what `build` makes of the request with digest `wanted`, `proof` among it."""
    with _locked(root.with_name(root.name + ".lock")):
        if _stamp(root) != wanted or not proof.exists():
            shutil.rmtree(root, ignore_errors=True)
            build()
            (root / STAMP).write_text(wanted)


def run(command: Sequence[str], what: str) -> None:
    """Run one step of building `what`. Raises `UserError` with its last lines when it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise UserError(f"Could not build the {what} environment; `{' '.join(command)}` failed:\n{tail}")


def find_python(least: str) -> str | None:
    """An interpreter of version `least` ("3.12") or newer: this one, on the PATH, or of pyenv."""
    major, minor = map(int, least.split("."))
    if sys.version_info[:2] >= (major, minor):
        return str(Path(sys.executable).resolve())  # however this process was started
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for newer in range(minor, minor + 4):
        name = f"{major}.{newer}"
        for candidate in (shutil.which(f"python{name}"), *sorted(pyenv.glob(f"{name}.*/bin/python"))):
            if candidate and (found := _version(str(candidate))) and found >= (major, minor):
                return str(candidate)
    return None


def _version(python: str) -> tuple[int, ...] | None:
    script = "import sys, venv; print(*sys.version_info[:2])"
    tried = subprocess.run([python, "-c", script], capture_output=True, text=True)
    return tuple(map(int, tried.stdout.split())) if tried.returncode == 0 else None


def _with_uv(root: Path, installs: Sequence[Sequence[str]], python: str) -> bool:
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        return False
    steps = [[uv, "venv", "--quiet", "--python", python, str(root)]]
    steps += [[uv, "pip", "install", "--quiet", "--python", str(root), *words] for words in installs]
    return all(subprocess.run(step, capture_output=True).returncode == 0 for step in steps)


def _with_pip(
    root: Path, installs: Sequence[Sequence[str]], python: str, report: Callable[[str], None]
) -> None:
    run([python, "-m", "venv", str(root)], root.name)
    for arguments in installs:
        report("pip install " + " ".join(arguments))
        run([str(root / "bin" / "python"), "-m", "pip", "install", "--quiet", *arguments], root.name)


def _compile(interpreter: Path, imports: Sequence[str]) -> None:
    """Sandboxes cannot write into the environment: what is not compiled here is compiled at every start.

    Of large environments a small part is ever loaded. What cannot be imported here is left as it is.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([str(interpreter), "-c", f"import {', '.join(imports)}"], capture_output=True, env=env)


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


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
