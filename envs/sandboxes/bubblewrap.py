"""The command line that builds a sandbox's namespaces, and what the host offers for it.

The sandbox's root is a private directory of its own, writable by the agent; only the system's
programs (`/usr` and what belongs to it) are shared, read-only. Every path outside `/usr` that the
agent writes stays in that directory and is gone with it.
"""

import os
import platform
import shlex
import shutil
import stat
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from titogym.envs.sandboxes.base import SandboxError
from titogym.envs.task import Limits
from titogym.errors import UserError

_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
# Top-level names that belong to the system: made anew for every sandbox, never taken over.
SYSTEM_ENTRIES = frozenset(_MERGED) | {"usr", "nix", "etc", "proc", "dev", "sys", "run"}
SYSTEM_ENTRIES |= {"tests", "solution", "logs"}
_SYSTEM_DIRECTORIES = ("dev", "etc", "logs", "logs/agent", "logs/verifier", "proc", "run", "usr")
_STANDARD_DIRECTORIES = ("home", "mnt", "opt", "root", "srv", "tmp", "var", "var/log", "var/tmp")
_ETC_DIRECTORIES = ("alternatives", "ssl", "ca-certificates", "pki", "perl", "python3", "terminfo", "fonts")
_ETC_FILES = ("ld.so.cache", "localtime", "os-release", "services")
_ETC_TEXTS = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Host:
    """What was found on this machine."""

    bwrap: str
    options: frozenset[str]  # long options that this bubblewrap knows
    python: str
    shell: str
    counts_processes_per_sandbox: bool  # RLIMIT_NPROC is counted per user namespace


@cache
def host() -> Host:
    """Look for bubblewrap and its needs once. Raises `UserError` with what to install."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise UserError(
            "The local sandbox needs bubblewrap, which is not installed: run "
            "`sudo apt-get install bubblewrap` (Debian, Ubuntu) or `sudo dnf install bubblewrap` (Fedora)."
        )
    python = _in_usr("python3")
    if python is None:
        raise UserError(
            "The local sandbox needs a python3 under /usr (programs elsewhere are invisible inside): "
            "run `sudo apt-get install python3`."
        )
    usage = subprocess.run([bwrap, "--help"], capture_output=True, text=True)
    options = frozenset(word for word in (usage.stdout + usage.stderr).split() if word.startswith("--"))
    major, minor = (int(part) for part in platform.release().split("-")[0].split(".")[:2])
    return Host(bwrap, options, python, _in_usr("bash") or "/bin/sh", (major, minor) >= (5, 14))


def probe(user: int | None) -> None:
    """Try whether namespaces can be made at all. Raises `UserError` with what to change."""
    line = [host().bwrap, "--unshare-user", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/"]
    line += ["--proc", "/proc", "--dev", "/dev", "--", "/bin/sh", "-c", "true"]
    tried = subprocess.run(line if user is None else as_user(line, user, {}), capture_output=True, text=True)
    if tried.returncode != 0:
        raise UserError(
            f"This machine does not let a sandbox have namespaces (bubblewrap: {tried.stderr.strip()}). On "
            "Debian set `sysctl kernel.unprivileged_userns_clone=1`, on Ubuntu `sysctl "
            "kernel.apparmor_restrict_unprivileged_userns=0`, in a container start it with "
            "`--security-opt seccomp=unconfined --security-opt systempaths=unconfined`."
        )


def make_system(root: Path, *, network: bool, user: int | None) -> None:
    """Lay out the system's part of a fresh root directory, which must not exist.

    Everything in it belongs to `user`, where one is given.
    """
    made = [str(root), *(f"{root}/{name}" for name in _SYSTEM_DIRECTORIES)]
    for path in made:
        os.mkdir(path)
    for name, target in _merged_links().items():
        os.symlink(target, f"{root}/{name}")
        made.append(f"{root}/{name}")
    for name, content in _etc_files(network).items():
        path = f"{root}/etc/{name}"
        with open(path, "xb", 0) as file:
            file.write(content)
        made.append(path)
    _give(made, user)


def complete(root: Path, *, workdir: str, user: int | None) -> list[str]:
    """Make the standard directories and the work directory where they are missing.

    Returns those in whose place something else was found, a link perhaps; that is deleted. Raises
    `SandboxError` for a work directory that cannot be one.
    """
    parts = PurePosixPath(workdir).parts
    if parts[:1] != ("/",) or ".." in parts or (len(parts) > 1 and parts[1] in SYSTEM_ENTRIES):
        raise SandboxError(
            f"{workdir!r} cannot be a work directory: give an absolute path outside the system."
        )
    nested = ("/".join(parts[1:end]) for end in range(2, len(parts) + 1))
    made, replaced = [], []
    for name in dict.fromkeys((*_STANDARD_DIRECTORIES, *nested)):
        path = f"{root}/{name}"
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            pass
        else:
            if stat.S_ISDIR(mode):
                if mode & stat.S_IRWXU != stat.S_IRWXU:
                    os.chmod(path, stat.S_IMODE(mode) | stat.S_IRWXU)
                continue
            os.unlink(path)
            replaced.append(f"/{name}")
        os.mkdir(path)
        made.append(path)
    _give(made, user)
    return replaced


def _give(paths: Iterable[str], user: int | None) -> None:
    if user is not None:
        for path in paths:
            os.lchown(path, user, user)


@cache
def _merged_links() -> dict[str, str]:
    return {name: os.readlink(f"/{name}") for name in _MERGED if os.path.islink(f"/{name}")}


@cache
def _etc_files(network: bool) -> dict[str, bytes]:
    files = {name: text.encode() for name, text in _ETC_TEXTS.items()}
    for name in (*_ETC_FILES, *(["resolv.conf"] if network else [])):
        with suppress(OSError):
            files[name] = Path("/etc", name).read_bytes()
    return files


def command(
    root: Path,
    inner: Sequence[str],
    *,
    info_fd: int,
    network: bool,
    memory_mb: int,
    read_only: Mapping[str, Path],
) -> list[str]:
    """`bwrap ... -- inner`: new namespaces over `root`, `inner` being process 1.

    `read_only` maps paths inside to host directories. `info_fd` receives the pid of process 1 as JSON.
    """
    found = host()
    line = [found.bwrap, "--unshare-user", "--uid", "0", "--gid", "0", "--unshare-pid", "--unshare-ipc"]
    line += ["--unshare-uts", "--hostname", "sandbox", "--unshare-cgroup-try"]
    line += [] if network else ["--unshare-net"]
    line += ["--disable-userns"] if "--disable-userns" in found.options else []
    # As root elsewhere, pass over the modes of one's own files; a namespace has no others to offer.
    line += ["--cap-drop", "ALL", "--cap-add", "CAP_DAC_OVERRIDE"]
    line += ["--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    line += ["--bind", str(root), "/", "--ro-bind", "/usr", "/usr", "--ro-bind-try", "/nix", "/nix"]
    for name in _MERGED:
        if name not in _merged_links():
            line += ["--ro-bind-try", f"/{name}", f"/{name}"]
    for name in _ETC_DIRECTORIES:
        line += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for target, source in read_only.items():
        line += ["--ro-bind", str(source), target]
    line += ["--proc", "/proc", "--dev", "/dev"]
    line += ["--size", str(memory_mb * _MIB)] if "--size" in found.options else []
    line += ["--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--info-fd", str(info_fd)]
    return [*line, "--", *inner]


def as_user(line: Sequence[str], user: int, staged: Mapping[Path, Path]) -> list[str]:
    """`line` run by root under the host user id `user`.

    `staged` maps empty files or directories to what shall be seen in their place. That user may not be
    able to reach the latter (a directory under `/root`, say), so root mounts them first, in a mount
    namespace that vanishes with the process.
    """
    drop = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--", *line]
    if not staged:
        return drop
    mounts = [
        f"mount --rbind {shlex.quote(str(source))} {shlex.quote(str(at))}" for at, source in staged.items()
    ]
    script = " && ".join([*mounts, 'exec "$@"'])
    return ["unshare", "--mount", "--propagation", "private", "--", "/bin/sh", "-c", script, "sh", *drop]


def process_limits(limits: Limits, *, grouped: Collection[str]) -> list[str]:
    """Per-process limits as `NAME=value`, for process 1 to set on itself and all its children.

    `grouped` names what control groups already bound for the sandbox as a whole (memory, pids, cpu).
    """
    found = {"FSIZE": limits.storage_mb * _MIB, "CORE": 0}
    if "memory" not in grouped:
        found["AS"] = limits.memory_mb * _MIB
    if "cpu" not in grouped:
        found["CPU"] = max(1, round(limits.agent_seconds * limits.cpus))
    if "pids" not in grouped and host().counts_processes_per_sandbox:
        found["NPROC"] = limits.processes
    return [f"{name}={value}" for name, value in found.items()]


def _in_usr(program: str) -> str | None:
    return shutil.which(program, path="/usr/local/bin:/usr/bin")
