"""Runs the script on directories that the agent never saw; the rules are written down once more here."""

import os
import re
import subprocess
import tempfile
from pathlib import Path

CASES = [
    ["My Report (final).TXT", "my-report-final.txt", "MY report FINAL.txt"],
    ["--x--", "X", "x"],
    ["a b.tar.gz", "A_B.tar.gz", "a  b.TAR.GZ", "a-b-2.tar.gz"],
    ["  leading and trailing  ", "already-clean.txt", "*star*?[1].txt", "$HOME `date` 'q' \"d\".sh"],
    [f"Photo {number}.JPG" for number in range(12)] + ["photo-3.jpg"],
    ["-rf", "-n.Txt", "back\\slash\\n"],
    [],
]


def clean(name):
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def expected(names):
    """Name in the end -> name in the beginning."""
    present = {name: name for name in names}
    for name in sorted(names, key=str.encode):
        stem, dot, rest = clean(name).partition(".")
        wanted, number = stem + dot + rest, 2
        while wanted != name and (wanted in present or wanted == "Sub Folder"):
            wanted, number = f"{stem}-{number}{dot}{rest}", number + 1
        del present[name]
        present[wanted] = name
    return present


def run(directory):
    return subprocess.run(["/app/slugify", str(directory)], capture_output=True, timeout=10, cwd="/")


assert os.access("/app/slugify", os.X_OK), "/app/slugify is not executable"
for names in CASES:
    with tempfile.TemporaryDirectory(prefix="some where ") as scratch:
        directory = Path(scratch)
        for name in names:
            (directory / name).write_text(name)
        (directory / "Sub Folder").mkdir()
        (directory / "Sub Folder" / "Inner File").write_text("inner")
        (directory / "A Link").symlink_to("nowhere")
        done = run(directory)
        assert done.returncode == 0 and not done.stdout + done.stderr, f"{names}: {done}"
        assert (directory / "Sub Folder" / "Inner File").read_text() == "inner", "a sub-directory was changed"
        assert os.readlink(directory / "A Link") == "nowhere", "a link was changed"
        found = {path.name: path.read_text() for path in directory.iterdir() if path.is_file()}
        assert found == expected(names), f"{names} became {found}, not {expected(names)}"
assert run("/app/slugify").returncode == 2, "a file as the argument must give status 2"
assert run("/no/such/directory").returncode == 2, "a missing directory must give status 2"
print("slugify does as told")
