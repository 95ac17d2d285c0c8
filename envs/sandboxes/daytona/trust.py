"""Whether the programs that grading relies on are still those of the image.

On Daytona the tests run in the agent's own sandbox. Two things are compared with the state before the agent
came: the shell and its helpers by content, read by Daytona's daemon and not by a program inside, and the
rest of the system by size and change time, which no program can set.
"""

import base64
import gzip
import hashlib
from collections.abc import Iterable

# The daemon follows links, so a shell that was replaced by a link is noticed as well.
PROGRAMS = ("/bin/sh", "/bin/bash", "/usr/bin/env", "/usr/bin/find", "/usr/bin/head", "/usr/bin/base64")
_MOST = 20

# What nothing executes is left out. busybox has no -printf: there the listing is empty, and nothing is known
# of the rest of the system.
LISTING = (
    "find /usr /bin /sbin /lib /lib64 /etc -xdev "
    r"\( -path /usr/share -o -path /usr/include -o -path /usr/src -o -name __pycache__ \) -prune -o "
    r"! -type d -printf '%C@ %s %p\n' 2>/dev/null | gzip -1 -c | base64"
)


def digests(contents: Iterable[tuple[str, bytes | None]]) -> dict[str, str]:
    """Path -> digest of what is there; a program that is missing has none."""
    return {
        path: hashlib.sha256(content).hexdigest() if content is not None else "" for path, content in contents
    }


def listing(output: str) -> dict[str, str]:
    """Path -> change time and size, from what `LISTING` wrote."""
    try:
        lines = gzip.decompress(base64.b64decode(output)).decode(errors="replace").splitlines()
    except (ValueError, OSError, EOFError):
        return {}
    parts = (line.split(" ", 2) for line in lines)
    return {part[2]: f"{part[0]} {part[1]}" for part in parts if len(part) == 3}


def remarks(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """What changed of the system, for people: one sentence, or none."""
    changed = sorted(path for path in {**before, **after} if before.get(path) != after.get(path))
    if not before or not changed:
        return []
    more = f" and {len(changed) - _MOST} more" if len(changed) > _MOST else ""
    return [f"files of the system were changed: {', '.join(changed[:_MOST])}{more}"]
