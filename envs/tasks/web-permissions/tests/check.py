"""Compares kinds, modes and contents with what the task asks for."""

import os
import stat
from pathlib import Path

SITE = Path("/app/site")
MODES = {
    ".": 0o755,
    "cgi": 0o755,
    "cgi/README": 0o644,
    "cgi/hello": 0o755,
    "cgi/legacy.pl": 0o755,
    "cgi/notes": 0o644,
    "empty": 0o755,
    "index.html": 0o644,
    "private": 0o700,
    "private/keys": 0o700,
    "private/keys/old": 0o700,
    "private/keys/old/id": 0o600,
    "private/passwords": 0o600,
    "private/run.sh": 0o600,
    "with space": 0o755,
    "with space/page one.html": 0o644,
}
LINKS = {"shared": "../shared.txt", "shortcut": "private"}
CONTENTS = {
    "cgi/README": "The line #!/bin/sh starts a script.\n",
    "cgi/hello": "#!/bin/sh\necho hello\n",
    "cgi/legacy.pl": "#!/usr/bin/perl\nprint 1;\n",
    "cgi/notes": "\n#!not first\n",
    "index.html": "<h1>Home</h1>\n",
    "private/keys/old/id": "key\n",
    "private/passwords": "user:secret\n",
    "private/run.sh": "#!/bin/sh\n",
    "with space/page one.html": "<p>one</p>\n",
}

found = {str(path.relative_to(SITE)): path.lstat() for path in [SITE, *SITE.rglob("*")]}
assert set(found) == set(MODES) | set(LINKS), f"there are other files: {sorted(found)}"
for name, target in LINKS.items():
    assert stat.S_ISLNK(found[name].st_mode) and os.readlink(SITE / name) == target, f"{name} was changed"
for name, mode in MODES.items():
    assert stat.S_ISREG(found[name].st_mode) == (name in CONTENTS), f"{name} is of another kind"
    assert stat.S_IMODE(found[name].st_mode) == mode, f"{name}: {stat.S_IMODE(found[name].st_mode):o}, not {mode:o}"
for name, text in CONTENTS.items():
    assert (SITE / name).read_text() == text, f"the content of {name} was changed"
assert stat.S_IMODE(os.stat("/app/shared.txt").st_mode) == 0o640, "shared.txt outside the site was touched"
print("all modes are right")
