"""Node programs that titogym installs for itself, each under `$TITOGYM_HOME/npm/NAME`.

Where the system's Node.js is too old for a program, one that npm has as a package is installed beside it.
"""

import hashlib
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from titogym.errors import UserError
from titogym.venvs import home, once, run

_NODE = "22.23.5"  # the one that is installed
_ARCHITECTURES = {"x86_64": "x64", "aarch64": "arm64", "arm64": "arm64"}


def ensure(
    name: str,
    packages: Sequence[str],
    *,
    node: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[Path, Path]:
    """The prefix where npm has installed `packages`, and the Node.js to run them by.

    node: its least major version. Two processes that ask at the same time install once. Raises
    `UserError` when there is no npm, or it fails.
    """
    root = home() / "npm" / name
    npm, system = shutil.which("npm"), shutil.which("node", path="/usr/local/bin:/usr/bin")
    own = system is None or _major(system) < (node or 0)
    wanted = [*packages, *([_node_package()] if own else [])]

    def build() -> None:
        if npm is None:
            raise UserError(f"{name} comes by npm, which is not installed: install Node.js.")
        report(f"Installing {name} in {root} (once)")
        root.mkdir(parents=True)
        run([npm, "install", "--prefix", str(root), "--no-audit", "--no-fund", *wanted], name)

    once(root, hashlib.sha256("\0".join(wanted).encode()).hexdigest(), build, proof=root / "node_modules")
    if own:
        return root, root / "node_modules" / _node_package().rpartition("@")[0] / "bin" / "node"
    return root, Path(str(system))


def _major(node: str) -> int:
    told = subprocess.run([node, "--version"], capture_output=True, text=True).stdout
    return int(told.strip().lstrip("v").partition(".")[0] or 0)


def _node_package() -> str:
    system = platform.system().lower()
    return f"node-{system}-{_ARCHITECTURES.get(platform.machine(), platform.machine())}@{_NODE}"
