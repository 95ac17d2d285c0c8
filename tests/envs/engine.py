"""A container engine of the tests' own, and small images for it made of this machine's programs."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BUSYBOX = "titogym-test/busybox"
SYSTEM = "titogym-test/system"  # bash, coreutils, python3
# fmt: off
_PROGRAMS = [
    "bash", "cat", "chmod", "chown", "cp", "cut", "date", "dd", "diff", "env", "find", "grep", "head", "id",
    "ln", "ls", "mkdir", "mkfifo", "mknod", "mv", "printf", "python3", "readlink", "rm", "sed", "seq",
    "setpriv", "setsid", "sh", "sleep", "sort", "tail", "tar", "test", "touch", "tr", "true", "wc",
]
# fmt: on
_START_SECONDS = 60


@contextmanager
def private_engine() -> Iterator[str]:
    """The address of a dockerd that nothing else uses. Skips where this machine cannot have one."""
    daemon = shutil.which("dockerd", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if os.geteuid() != 0 or daemon is None:
        pytest.skip("DOCKER NOT TESTED: it takes root and dockerd (apt-get install docker.io)")
    home = Path(tempfile.mkdtemp(prefix="tg-", dir="/var/tmp"))  # overlayfs does not stack on itself
    address = f"unix://{home}/docker.sock"
    line = [daemon, "--data-root", f"{home}/data", "--exec-root", f"{home}/exec", "--host", address]
    line += ["--pidfile", f"{home}/docker.pid", "--bridge=none", "--iptables=false", "--ip6tables=false"]
    line += ["--ip-forward=false", "--ip-masq=false"]
    log = home / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
    try:
        _await_ready(process, home, log)
        yield address
    finally:
        _stop(process, home)


def _await_ready(process: "subprocess.Popen[bytes]", home: Path, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    ping = ["curl", "-sf", "--unix-socket", f"{home}/docker.sock", "http://docker/_ping"]
    while subprocess.run(ping, capture_output=True).returncode != 0:
        if process.poll() is not None:
            last = log.read_text(errors="replace").strip().splitlines()[-1]
            if "not permitted" in last or "not supported" in last or "ermission denied" in last:
                pytest.skip(f"DOCKER NOT TESTED: this kernel does not let dockerd run: {last}")
            raise RuntimeError(f"dockerd stopped: {last}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"dockerd is not ready after {_START_SECONDS} s; see {log}")
        time.sleep(0.1)


def _stop(process: "subprocess.Popen[bytes]", home: Path) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    pidfile = home / "exec" / "containerd" / "containerd.pid"
    if pidfile.exists():
        subprocess.run(["kill", "-9", pidfile.read_text()], capture_output=True)
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in sorted((point for point in mounted if point.startswith(f"{home}/")), reverse=True):
        subprocess.run(["umount", "-l", point], capture_output=True)
    shutil.rmtree(home, ignore_errors=True)


def load_images(address: str) -> None:
    """Import both images."""
    import docker

    api = docker.APIClient(base_url=address, version="auto")
    changes = ['CMD ["sh"]', "ENV PATH=/usr/local/bin:/usr/bin:/bin", "ENV FROM_IMAGE=yes"]
    for name, archive in ((BUSYBOX, _busybox()), (SYSTEM, _system())):
        api.import_image_from_data(archive, repository=name, tag="latest", changes=changes)
    api.close()


def _busybox() -> bytes:
    program = shutil.which("busybox")
    if program is None:
        pytest.skip("DOCKER NOT TESTED: busybox is missing (apt-get install busybox-static)")
    image = _Image()
    image.file("bin/busybox", Path(program))
    for name in subprocess.check_output([program, "--list"], text=True).split():
        if name != "busybox":
            image.link(f"bin/{name}", "/bin/busybox")
    return image.done()


def _system() -> bytes:
    image = _Image(merged=True)
    libraries: set[str] = set()
    for name in _PROGRAMS:
        path = Path(shutil.which(name, path="/usr/bin:/usr/sbin") or "/usr/bin/false").resolve()
        image.file(f"usr/bin/{name}", path)
        libraries |= _libraries(path)
    version = subprocess.check_output(
        ["/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True
    ).strip()
    standard = Path("/usr/lib", f"python{version}")
    for path in sorted(standard.rglob("*")):
        relative = path.relative_to(standard).parts
        if path.is_file() and not {"__pycache__", "test", "idlelib", "lib2to3"} & set(relative):
            image.file(str(path).lstrip("/"), path)
            if path.suffix == ".so":
                libraries |= _libraries(path)
    for library in sorted(libraries):
        image.file("usr/" + library.lstrip("/").removeprefix("usr/"), Path(library).resolve())
    return image.done()


def _libraries(path: Path) -> set[str]:
    text = subprocess.run(["ldd", str(path)], capture_output=True, text=True).stdout
    return {word for word in text.split() if word.startswith("/")}


class _Image:
    """The tar archive of a root directory."""

    def __init__(self, *, merged: bool = False) -> None:
        self._buffer = io.BytesIO()
        self._archive = tarfile.open(fileobj=self._buffer, mode="w")  # noqa: SIM115 (closed in `done`)
        self._made: set[str] = set()
        for name in ("etc", "root", "proc", "sys", "dev", "tmp", "home", "usr", "var"):
            self._directory(name, 0o1777 if name == "tmp" else 0o755)
        if merged:
            for name in ("bin", "sbin", "lib", "lib64"):
                self._directory(f"usr/{name}", 0o755)
                self.link(name, f"usr/{name}")
        self._text("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/home:/bin/sh\n")
        self._text("etc/group", "root:x:0:\nagent:x:1000:\n")

    def file(self, name: str, path: Path) -> None:
        for parent in reversed(Path(name).parents[:-1]):
            self._directory(str(parent), 0o755)
        if name not in self._made:
            self._made.add(name)
            member = tarfile.TarInfo(name)
            member.size, member.mode = path.stat().st_size, path.stat().st_mode & 0o755
            with path.open("rb") as content:
                self._archive.addfile(member, content)

    def link(self, name: str, target: str) -> None:
        self._made.add(name)
        member = tarfile.TarInfo(name)
        member.type, member.linkname = tarfile.SYMTYPE, target
        self._archive.addfile(member)

    def done(self) -> bytes:
        self._archive.close()
        return self._buffer.getvalue()

    def _directory(self, name: str, mode: int) -> None:
        if name not in self._made:
            self._made.add(name)
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, mode
            self._archive.addfile(member)

    def _text(self, name: str, text: str) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(text), 0o644
        self._archive.addfile(member, io.BytesIO(text.encode()))


if __name__ == "__main__":  # an engine to try things by hand, until Ctrl-C
    with private_engine() as engine:
        load_images(engine)
        print(f"export DOCKER_HOST={engine}", flush=True)
        sys.stdin.read()
