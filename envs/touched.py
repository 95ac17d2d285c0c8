"""What an agent touched of what tests trust: a report for the evidence of a grade.

Test runners execute files that nobody names: `conftest.py`, `sitecustomize.py`, `*.pth`, start-up files of
shells, programs found first by PATH, modules named like Python's own. The verifier's own protections do
not depend on this report; it tells people where to look.
"""

import sys
from collections.abc import Mapping

from titogym.envs.sandboxes.base import Sandbox

TEST_PATHS = ("/tests", "/solution", "/logs/verifier")
_SECONDS = 30.0
_OUTPUT_BYTES = 1 << 17
_MOST = 50
_NAMES = (
    "conftest.py", "pytest.ini", ".pytest.ini", "sitecustomize.py", "usercustomize.py", "*.pth", ".bashrc",
    ".bash_profile", ".bash_login", ".profile", ".zshenv", ".zshrc", ".pythonrc.py", "ld.so.preload",
    "environment", "profile", "bash.bashrc",
)  # fmt: skip
_PROGRAMS = (
    "bash", "sh", "env", "test", "cat", "cmp", "cp", "diff", "echo", "find", "grep", "head", "jq", "ls",
    "sed", "sort", "tail", "timeout", "tr", "wc", "awk", "sqlite3", "python", "python3", "pytest", "pip",
    "pip3", "uv", "uvx", "curl", "wget", "git", "make", "gcc", "cc", "g++", "rustc", "cargo", "go", "java",
    "node", "npm", "npx",
)  # fmt: skip


def _any(names: tuple[str, ...], condition: str = "") -> str:
    return " -o ".join(f"-name '{name}'{condition}" for name in names)


# Directories of the system are the sandbox's matter: they are new for the tests, or remarked on.
_SCAN = rf"""
digest() {{ md5sum 2>/dev/null || cksum 2>/dev/null || wc -c; }}
workdir=$1
set --
for top in /* /.[!.]*; do
  case $top in
    /usr|/bin|/sbin|/lib|/lib32|/lib64|/libx32|/proc|/sys|/dev|/boot|/run|/tests|/solution|/logs) continue;;
  esac
  [ -d "$top" ] && [ ! -L "$top" ] && set -- "$@" "$top"
done
{{
  find {" ".join(TEST_PATHS)} ! -type d 2>/dev/null
  [ $# = 0 ] || find "$@" -xdev \( {_any(_NAMES)} -o {_any(_PROGRAMS, " ! -type d")} \) 2>/dev/null
  for entry in "$workdir"/*.py "$workdir"/*/__init__.py; do [ -e "$entry" ] && echo "$entry"; done
}} | while IFS= read -r path; do
  if [ -L "$path" ]; then printf 'link %s\t%s\n' "$(readlink -- "$path")" "$path"
  elif [ -f "$path" ]; then printf '%s\t%s\n' "$(digest < "$path" 2>/dev/null)" "$path"
  else printf 'directory\t%s\n' "$path"; fi
done
"""

Touchable = Mapping[str, str]  # path inside -> digest of its content


async def look(sandbox: Sandbox, workdir: str) -> Touchable:
    """Everything there that tests might run unasked. Raises `SandboxError` where nobody can look any more."""
    done = await sandbox.exec(
        ["/bin/sh", "-c", _SCAN, "sh", workdir], cwd="/", timeout=_SECONDS, max_output=_OUTPUT_BYTES
    )
    found = {}
    for line in done.stdout.splitlines():
        digest, tab, path = line.partition("\t")
        if tab and _matters(path, workdir):
            found[path] = digest
    return found


def changes(before: Touchable, after: Touchable) -> list[str]:
    """Paths that appeared, changed or went, at most 50 of them, those under the test paths first."""
    touched = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    return sorted(touched, key=lambda path: (not path.startswith(TEST_PATHS), path))[:_MOST]


def _matters(path: str, workdir: str) -> bool:
    """Of the Python files in the work directory, those named like a module of Python's own."""
    directory, _, name = path.rpartition("/")
    if name == "__init__.py" and directory.rpartition("/")[0] == workdir.rstrip("/"):
        return directory.rpartition("/")[2] in sys.stdlib_module_names
    if directory == workdir.rstrip("/") and name.endswith(".py") and name not in _NAMES:
        return name.removesuffix(".py") in sys.stdlib_module_names
    return True
