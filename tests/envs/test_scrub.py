"""Answers that lie in the image: in git's history, in package caches, beside the work."""

import shutil

import pytest

from titogym.envs.sandboxes.base import SandboxError, SandboxSpec
from titogym.envs.scrub import scrub

pytestmark = pytest.mark.sandbox

ANSWER = "the-answer-is-42"
REPOSITORY = f"""
set -e
git config --global user.email a@b; git config --global user.name a
git init -q -b main /app/repo; cd /app/repo
echo {ANSWER} > solution.txt; git add .; git commit -qm 'with the answer'; git tag answer
git rm -q solution.txt; echo start > a.txt; git add a.txt; git commit -qm 'the start'
git checkout -qb fixed; echo {ANSWER} > b.txt; git add b.txt; git commit -qm fix; git checkout -q main
echo {ANSWER} > c.txt; git add c.txt; git stash -q
echo {ANSWER} | git hash-object -w --stdin > /dev/null
git clone -q --bare . /srv/mirror.git; git remote add origin /srv/mirror.git; git fetch -q
git gc -q; git notes add -m {ANSWER} HEAD; git worktree add -q /app/other fixed; rm -rf /app/other
echo more >> a.txt
"""
# Whatever git can still show, from every object of every store.
SEARCH = """
for store in /app/repo/.git /srv/mirror.git; do
  git --git-dir=$store cat-file --batch-all-objects --batch 2>&1
  grep -ra . $store/logs $store/packed-refs $store/refs 2>/dev/null
done
"""


@pytest.fixture
async def sandbox(backend):
    made = await backend.create(SandboxSpec(workdir="/app"))
    yield made
    await made.destroy()


@pytest.mark.skipif(shutil.which("git", path="/usr/bin:/bin") is None, reason="git is not installed")
async def test_no_object_of_git_holds_what_the_history_held(sandbox):
    done = await sandbox.exec(REPOSITORY)
    assert done.exit_code == 0, done.stderr
    assert ANSWER in (await sandbox.exec(SEARCH)).stdout
    await scrub(sandbox, ["git-history"])
    found = (await sandbox.exec(SEARCH)).stdout
    assert ANSWER not in found
    assert "with the answer" not in found
    status = await sandbox.exec(
        "cd /app/repo; git status --porcelain; git log --all --format=%s; git remote; git fsck; cat a.txt"
    )
    assert status.stdout == " M a.txt\nThe state at the start of the task\nstart\nmore\n", status
    assert (
        await sandbox.exec("cd /app/repo && git commit -qam more && git log --oneline | wc -l")
    ).stdout == "2\n"
    await scrub(sandbox, ["git-history"])  # is done to what is there: also twice


async def test_without_repositories_there_is_nothing_to_do(sandbox):
    await scrub(sandbox, ["git-history"])
    await scrub(sandbox, [])


async def test_caches_and_paths_are_removed(sandbox):
    await sandbox.exec(
        "mkdir -p ~/.cache/pip/http /home/me/.npm/_cacache '/app/x y' /app/keep;"
        "touch ~/.cache/pip/http/a /home/me/.npm/_cacache/b /app/a.orig /app/keep/c '/app/x y/d' '/app/;id'"
    )
    await scrub(sandbox, ["package-caches", "/app/*.orig", "/app/x y", "/app/;id", "/nowhere"])
    left = await sandbox.exec("find /root/.cache /home /app -type f")
    assert left.stdout == "/app/keep/c\n"


async def test_what_cannot_be_removed_is_an_error(sandbox):
    with pytest.raises(SandboxError, match="Could not scrub"):
        await scrub(sandbox, ["/usr/bin/env"])
