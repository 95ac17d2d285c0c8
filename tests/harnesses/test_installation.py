"""Environments of harness programs: built once, found again, rebuilt when something else is asked for."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from titogym import venvs
from titogym.errors import UserError


def wheel(folder: Path, version: str) -> str:
    path = folder / f"tiny-{version}-py3-none-any.whl"
    info = f"tiny-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("tiny.py", f"VERSION = {version!r}\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return str(path)


def installed(python: Path) -> str:
    script = "import tiny; print(tiny.VERSION)"
    return subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TITOGYM_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("uv", [True, False])
def test_an_environment_is_built_once_and_again_for_another_request(tmp_path: Path, uv: bool) -> None:
    first, second = wheel(tmp_path, "1.0"), wheel(tmp_path, "2.0")
    told: list[str] = []
    requests = (first, first, second) if uv else (first, first)  # pip takes its time
    for request in requests:
        python = venvs.ensure("tiny", [[request]], uv=uv, imports=["tiny"], report=told.append)
        assert installed(python) == ("1.0" if request == first else "2.0")
    assert sum("Setting up the tiny environment" in line for line in told) == len(set(requests))
    assert list(python.parents[1].glob("lib/*/site-packages/__pycache__/tiny.*.pyc"))


def test_what_cannot_be_installed_is_told_and_not_taken_for_done(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Could not build the nothing environment"):
        venvs.ensure("nothing", [[str(tmp_path / "nothing-1.0-py3-none-any.whl")]], uv=True)
    assert not (venvs.home() / "venvs" / "nothing" / venvs.STAMP).exists()


def test_a_python_is_found_by_its_least_version() -> None:
    found = venvs.find_python(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert found == str(Path(sys.executable).resolve())
    assert venvs.find_python("3.99") is None
