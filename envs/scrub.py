"""Removes from an image what would hand the agent the answer: git history, package caches, named files.

A task declares it in its `task.toml`, where other readers of the format keep it as plain metadata:

    [metadata.titogym]
    scrub = ["git-history", "package-caches", "/opt/reference", "/app/*.orig"]
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titogym.envs import task_toml
from titogym.envs.sandboxes.base import Sandbox, SandboxError
from titogym.errors import UserError

GIT_HISTORY = "git-history"
PACKAGE_CACHES = "package-caches"
_SECONDS = 300.0

# Every repository keeps the tree of its HEAD as its only commit: no other branch, tag, remote, stash,
# reflog or loose object. Bare mirrors and the stores of submodules and worktrees are repositories too.
_GIT = r"""
set -eu
export HOME=/root GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_PAGER=cat
export GIT_AUTHOR_NAME=task GIT_AUTHOR_EMAIL=task@localhost GIT_COMMITTER_NAME=task
export GIT_COMMITTER_EMAIL=task@localhost
stores=$(find / -xdev \( -path /proc -o -path /sys -o -path /usr/share \) -prune -o \
  -type d -name objects -print 2>/dev/null | while IFS= read -r objects; do
    store=${objects%/objects}
    [ -f "$store/HEAD" ] && [ -d "$store/refs" ] && printf '%s\n' "$store"
  done) || true
[ -n "$stores" ] || exit 0
command -v git >/dev/null || { echo 'there are repositories, and no git to scrub them with' >&2; exit 1; }
printf '%s\n' "$stores" | while IFS= read -r store; do
  cd "$store"
  run() { git --git-dir=. -c safe.directory='*' -c gc.auto=0 -c core.hooksPath=/dev/null "$@"; }
  if tree=$(run rev-parse -q --verify 'HEAD^{tree}'); then
    commit=$(run commit-tree "$tree" -m 'The state at the start of the task')
  else
    commit=
  fi
  branch=$(run symbolic-ref -q HEAD || true)
  run for-each-ref --format='delete %(refname)' | run update-ref --stdin
  for remote in $(run remote); do run remote remove "$remote"; done
  rm -rf logs worktrees packed-refs shallow ORIG_HEAD FETCH_HEAD MERGE_HEAD CHERRY_PICK_HEAD REVERT_HEAD \
    REBASE_HEAD AUTO_MERGE COMMIT_EDITMSG rebase-merge rebase-apply sequencer refs/stash refs/original
  if [ -n "$commit" ]; then
    if [ -n "$branch" ]; then run update-ref "$branch" "$commit"
    else run update-ref --no-deref HEAD "$commit"; fi
  fi
  run repack -q -a -d
  rm -f objects/info/alternates objects/info/commit-graph
  rm -rf objects/info/commit-graphs
  run prune --expire=now
  run repack -q -a -d
  if [ -n "$commit" ] && [ "$(run rev-list --all --reflog --count)" != 1 ]; then
    echo "$store keeps more than one commit" >&2; exit 1
  fi
done
"""

_CACHES = (
    *(f"{home}/{cache}" for home in ("/root", "/home/*") for cache in (
        ".cache/pip", ".cache/uv", ".cache/pypoetry", ".cache/yarn", ".cache/go-build", ".npm/_cacache",
        ".yarn/cache", ".local/share/pnpm/store", ".cargo/registry", ".cargo/git", ".m2/repository",
        ".gradle/caches", "go/pkg/mod/cache", ".gem/cache", ".conda/pkgs", ".cache/huggingface",
    )),
    "/var/cache/apt/archives/*.deb", "/var/cache/dnf", "/var/cache/yum", "/var/cache/apk",
    "/opt/conda/pkgs", "/usr/local/cargo/registry", "/go/pkg/mod/cache",
)  # fmt: skip


def declared(path: Path, metadata: Mapping[str, Any]) -> list[str]:
    """What the task's metadata wants scrubbed. Raises `UserError` naming `path`."""
    ours = metadata.get("titogym", {})
    wanted = ours.get("scrub", []) if isinstance(ours, dict) else None
    if not isinstance(wanted, list) or not all(isinstance(entry, str) for entry in wanted):
        raise UserError(f"{path}: metadata.titogym.scrub must be a list of texts.")
    for entry in wanted:
        inside = task_toml.inside(entry)
        if entry not in (GIT_HISTORY, PACKAGE_CACHES) and (inside is None or len(inside.parts) < 2):
            raise UserError(
                f"{path}: metadata.titogym.scrub has {entry!r}; write {GIT_HISTORY!r}, {PACKAGE_CACHES!r} or "
                "the absolute path (with * and ?) of what is to be removed."
            )
    return list(wanted)


async def scrub(sandbox: Sandbox, wanted: Sequence[str]) -> None:
    """Do it, in a sandbox that is laid out and has no agent yet. Raises `SandboxError` if anything stays."""
    if not wanted:
        return
    script = _GIT if GIT_HISTORY in wanted else ""
    paths = [entry for entry in wanted if entry.startswith("/")]
    paths += _CACHES if PACKAGE_CACHES in wanted else ()
    done = await sandbox.exec(["/bin/sh", "-c", script], cwd="/", timeout=_SECONDS)
    if done.exit_code == 0 and paths:
        # The patterns are arguments, expanded by the shell and never evaluated.
        remove = (
            'IFS=; for pattern in "$@"; do rm -rf -- $pattern; for left in $pattern; do '
            '[ ! -e "$left" ] || { echo "$left stays" >&2; exit 1; }; done; done'
        )
        done = await sandbox.exec(["/bin/sh", "-c", remove, "sh", *paths], cwd="/", timeout=_SECONDS)
    if done.exit_code != 0:
        raise SandboxError(f"Could not scrub the sandbox: {(done.stderr or done.stdout).strip()[-300:]}")
