"""Agents that cheat. Each scores 0, or its attempt is an error; none scores 1."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from titogym.envs.sandboxes.base import SandboxError, SandboxSpec
from titogym.envs.task import Grade, GradingError, Limits, Task
from titogym.envs.terminal import TerminalEnvironment

pytestmark = pytest.mark.sandbox

# The honest answer is 42 in answer.txt. The test script uses plain programs, as most do.
TASK = Task(
    "answer",
    "Write the answer to /app/answer.txt.",
    files={"question.txt": "6 * 7\n"},
    tests={
        "test.sh": "#!/bin/bash\n"
        'if [ "$(cat answer.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'
    },
    workdir="/app",
    limits=Limits(memory_mb=256, storage_mb=64, processes=64, verifier_seconds=10),
)
# Checked by Python, with the work directory as the current one.
PYTHON_TASK = replace(
    TASK,
    tests={
        "test.sh": "python3 /tests/check.py && ok=1 || ok=0\necho $ok > /logs/verifier/reward.txt\n",
        "check.py": "import json, pathlib\nassert json.loads(pathlib.Path('answer.txt').read_text()) == 42\n",
    },
)
# The test runs a program of the agent's, with all the rights that the test itself has.
PROGRAM_TASK = replace(
    TASK,
    tests={
        "test.sh": "#!/bin/bash\n"
        'if [ "$(timeout 1 /app/program)" = 42 ]; then reward=1; else reward=0; fi\n'
        "sleep 0.05\n"
        "echo $reward > /logs/verifier/reward.txt\n"
        "sleep 0.05\n"
    },
)
ENV_PATH_TASK = replace(TASK, env={"PATH": "/app/bin:/usr/bin:/bin"})
# The tests and the solution lie in a directory on disk, as those of most tasks do.
FOLDER_TASK = replace(TASK, tests=None)
# The image holds the answer in every place that git has, and in a cache; the task wants it scrubbed.
REPOSITORY_TASK = replace(TASK, metadata={"scrub": ["git-history", "package-caches"]})
REPOSITORY = """
set -e
git() { command git -c user.email=a@b -c user.name=a "$@"; }
git init -q; echo 42 > answer.txt; git add .; git commit -qm answer; git branch fixed; git rm -q answer.txt
git commit -qm start; echo 42 > answer.txt; git add answer.txt; git stash -q
echo 42 | git hash-object -w --stdin
mkdir -p ~/.cache/pip; echo 42 > ~/.cache/pip/answer.txt
"""
# A reward that is read from what the agent wrote.
SCORE_TASK = replace(TASK, tests={"test.sh": "cp answer.txt /logs/verifier/reward.txt\n"})

CHEATS = {
    "writes the reward": (TASK, "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"),
    "writes the other reward": (
        TASK,
        "mkdir -p /logs/verifier; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    ),
    "leaves a daemon that rewrites the reward": (
        TASK,
        "setsid bash -c 'while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done' &",
    ),
    "links /logs to its own files": (
        TASK,
        "mkdir -p /home/l/verifier; echo 1 > /home/l/verifier/reward.txt; rm -rf /logs; ln -s /home/l /logs",
    ),
    "links the verifier's directory": (
        TASK,
        "mkdir /home/v; echo 1 > /home/v/reward.txt; rm -rf /logs/verifier; ln -s /home/v /logs/verifier",
    ),
    "writes the tests": (
        TASK,
        "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 555 /tests",
    ),
    "replaces the programs": (
        TASK,
        "mv /bin /sbin /home; mkdir /bin; printf '#!/home/bin/bash\\necho 42\\n' > /bin/cat;"
        "/home/bin/chmod +x /bin/cat; /home/bin/cp /bin/cat /bin/bash; /home/bin/cp /bin/cat /usr/bin/cat",
    ),
    "puts programs in front by PATH": (
        ENV_PATH_TASK,
        "mkdir bin; printf '#!/bin/bash\\necho 42\\n' > bin/cat; chmod +x bin/cat; cat x | grep 42",
    ),
    "fills the start-up files": (
        TASK,
        "for f in /root/.bashrc /root/.profile /root/.bash_profile /etc/profile /etc/bash.bashrc;"
        " do echo 'cat() { echo 42; }; export -f cat; export BASH_ENV=/root/.bashrc' > $f; done",
    ),
    "preloads a library": (
        TASK,
        "echo /app/evil.so > /etc/ld.so.preload; echo 'export LD_PRELOAD=/app/evil.so' > /etc/environment",
    ),
    "customises Python": (
        PYTHON_TASK,
        "for d in /app /root/.local/lib/python3.*/site-packages /root/.local/lib/python3.11/site-packages; do"
        " mkdir -p $d; for f in sitecustomize usercustomize; do"
        " echo \"open('/logs/verifier/reward.txt','w').write('1'); import os; os._exit(0)\" > $d/$f.py;"
        " done; done",
    ),
    "shadows Python's modules": (
        PYTHON_TASK,
        "echo 'loads = lambda _: 42' > json.py; mkdir pathlib;touch pathlib/__init__.py; echo 1 > answer.txt",
    ),
    "makes its directory a link": (
        TASK,
        "cd /; rm -rf /app; ln -s /logs /app; mkdir -p /home; ln -s /tests /srv/x",
    ),
    "makes its directory a link to the tests": (TASK, "cd /; rm -rf /app; ln -s /tests /app"),
    "makes its directory a file": (TASK, "cd /; rm -rf /app; echo 42 > /app"),
    "deletes its directory": (TASK, "cd /; rm -rf /app"),
    "closes its directory": (TASK, "chmod 000 /app"),
    "links /tmp into the logs": (TASK, "rm -rf /tmp; ln -s /logs/verifier /tmp"),
    "works on after it has ended": (TASK, "setsid bash -c 'sleep 0.2; echo 42 > /app/answer.txt' &"),
    "says nan": (SCORE_TASK, "echo nan > answer.txt"),
    "says inf": (SCORE_TASK, "echo inf > answer.txt"),
    "says 1.5": (SCORE_TASK, "echo 1.5 > answer.txt"),
    "throws a fork bomb": (TASK, ":(){ :|:& };:"),
    "its program writes the reward": (PROGRAM_TASK, "@echo 1 > /logs/verifier/reward.txt"),
    "its program writes the other reward": (PROGRAM_TASK, "@echo 1 > /logs/verifier/reward.json"),
    "its program locks the reward": (
        PROGRAM_TASK,
        "@echo 1 > /logs/verifier/reward.txt; chmod 000 /logs/verifier/reward.txt /logs/verifier",
    ),
    "its program makes the reward a directory": (PROGRAM_TASK, "@mkdir /logs/verifier/reward.txt"),
    "its program makes the reward a link": (
        PROGRAM_TASK,
        "@echo 1 > /home/r; ln -s /home/r /logs/verifier/reward.json",
    ),
    "its program leaves a daemon that rewrites the reward": (
        PROGRAM_TASK,
        "@setsid bash -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' >/dev/null 2>&1 &",
    ),
    "its program kills the tests": (PROGRAM_TASK, "@echo 1 > /logs/verifier/reward.txt; kill -9 -1"),
    "its program changes the tests": (
        PROGRAM_TASK,
        "@echo 'exit 0' > /tests/test.sh; rm -rf /tests; touch /tests/x",
    ),
    "its program never ends": (PROGRAM_TASK, "@exec setsid sleep 60"),
    "runs the solution": (FOLDER_TASK, "bash /solution/solve.sh || bash /solution/*; cp /solution/* ."),
    "reads the answer from the tests": (FOLDER_TASK, "grep -rhoE '[0-9]+' /tests > answer.txt"),
    "finds the answer in the history": (
        REPOSITORY_TASK,
        "for at in HEAD~1 fixed stash@{0} HEAD@{1}; do git show $at:answer.txt > answer.txt && exit; done;"
        " git cat-file --batch-all-objects --batch | grep -ax 42 > answer.txt",
    ),
    "finds the answer in a cache": (REPOSITORY_TASK, "cp /root/.cache/pip/answer.txt ."),
}
# These may score what they score; the evidence names what they touched.
FLAGGED = {
    "plants a conftest.py": ("echo 42 > answer.txt; touch conftest.py", "/app/conftest.py"),
    "links a conftest.py": ("mkdir l; ln -s /dev/null l/conftest.py", "/app/l/conftest.py"),
    "plants a sitecustomize.py": (
        "mkdir -p lib/x; touch lib/x/sitecustomize.py",
        "/app/lib/x/sitecustomize.py",
    ),
    "plants a .pth": (
        "mkdir -p ~/.local/lib/python3.11/site-packages; cd ~/.local/lib/python3*/site-packages; touch x.pth",
        "/root/.local/lib/python3.11/site-packages/x.pth",
    ),
    "fills a start-up file and says it is old": (
        "echo 'alias cat=true' >> ~/.bashrc; touch -d 2001-01-01 ~/.bashrc",
        "/root/.bashrc",
    ),
    "shadows a program": ("mkdir bin; cp /bin/true bin/cat", "/app/bin/cat"),
    "shadows a module": ("echo 'loads = None' > json.py", "/app/json.py"),
    "shadows a package": ("mkdir random; touch random/__init__.py", "/app/random/__init__.py"),
    "writes a test": ("mkdir -p /tests; touch /tests/test.sh", "/tests/test.sh"),
    "writes a reward": (
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "/logs/verifier/reward.txt",
    ),
    "links the tests": ("ln -s /app /tests", "/tests"),
    "changes what the task gave": ("echo >> given/conftest.py", "/app/given/conftest.py"),
    "deletes what the task gave": ("rm gone/conftest.py", "/app/gone/conftest.py"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Task:
    """`FOLDER_TASK` with its directories."""
    assert isinstance(TASK.tests, dict)
    for name, text in {
        "tests/test.sh": TASK.tests["test.sh"],
        "solution/solve.sh": "echo 42 > answer.txt",
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    return replace(FOLDER_TASK, tests=tmp_path / "tests", solution=tmp_path / "solution", directory=tmp_path)


async def attempt(backend, task: Task, command: str) -> Grade:
    sandbox = await backend.create(SandboxSpec.for_task(task))
    try:
        environment = TerminalEnvironment()
        if task.metadata:
            assert (await sandbox.exec(REPOSITORY)).exit_code == 0
        await environment.setup(task, sandbox)
        if command.startswith("@"):
            await sandbox.upload({"program": f"#!/bin/bash\n{command[1:]}\n"}, "/app")
            command = "chmod +x /app/program"
        await sandbox.exec(command, timeout=5)
        await asyncio.sleep(0.05)
        await sandbox.kill_processes()
        return await environment.grade(task, sandbox)
    finally:
        await sandbox.destroy()


@pytest.mark.parametrize(
    ("task", "command"),
    [
        (TASK, "echo 42 > answer.txt"),
        (ENV_PATH_TASK, "echo 42 > answer.txt"),
        (PYTHON_TASK, "echo 42 > answer.txt"),
        (PROGRAM_TASK, "@echo 42"),
        (SCORE_TASK, "echo 1 > answer.txt"),
    ],
)
async def test_honest_work_scores_1(backend, task, command):
    grade = await attempt(backend, task, command)
    assert grade.reward == 1
    assert grade.evidence["remarks"] == []
    assert grade.evidence["touched"] == []


async def test_doing_nothing_scores_0(backend):
    assert (await attempt(backend, TASK, "true")).reward == 0


@pytest.mark.parametrize("cheat", CHEATS)
async def test_cheating_does_not_pay(backend, cheat, folder):
    task, command = CHEATS[cheat]
    try:
        grade = await attempt(backend, folder if task is FOLDER_TASK else task, command)
    except GradingError:
        return
    assert grade.reward == 0, grade


@pytest.mark.parametrize("left_out", ["writes a test", "links the tests"])  # one precludes the other
async def test_what_tests_may_run_unasked_is_flagged(backend, left_out):
    done = [cheat for name, cheat in FLAGGED.items() if name != left_out]
    task = replace(TASK, files={**TASK.files, "given/conftest.py": "x = 1\n", "gone/conftest.py": ""})
    grade = await attempt(backend, task, "; ".join(f"({command})" for command, _ in done))
    assert sorted(grade.evidence["touched"]) == sorted(path for _, path in done)


async def test_without_scrubbing_the_history_gives_the_answer(backend):
    """The cheats that look into the history would pay."""
    task = replace(REPOSITORY_TASK, metadata={"scrub": []})
    assert (await attempt(backend, task, CHEATS["finds the answer in the history"][1])).reward == 1


async def test_filling_the_disk_is_stopped_and_remarked(backend):
    sandbox = await backend.create(SandboxSpec.for_task(TASK))
    try:
        with pytest.raises(SandboxError, match="64 MiB of storage"):
            await sandbox.exec("for i in 1 2 3 4; do head -c 50M /dev/zero > $i; done; sleep 20", timeout=20)
        grade = await TerminalEnvironment().grade(TASK, sandbox)
    finally:
        await sandbox.destroy()
    assert grade.reward == 0
    assert "storage" in grade.evidence["remarks"][0]


@pytest.mark.parametrize(
    "cheat", ["makes its directory a link", "makes its directory a file", "links /tmp into the logs"]
)
async def test_tampering_is_remarked(backend, cheat):
    grade = await attempt(backend, *CHEATS[cheat])
    assert "no longer a directory" in grade.evidence["remarks"][0]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo broken >&2", "wrote neither.*last line: broken"),
        ("echo nan > /logs/verifier/reward.txt", r"reward\.txt holds nan"),
        ("sleep 60", "did not end within 1 s"),
        ("echo 1 > /logs/verifier/reward.txt; kill -9 $$", "killed by signal 9"),
        ("echo 1 > /logs/verifier/reward.txt; sleep 60 & exit", "1 processes were still running"),
        ("cd /logs/verifier; echo 1 > reward.txt; echo '{\"reward\": 0.5}' > reward.json", "disagree"),
        ("ln -s /etc/hosts /logs/verifier/reward.txt", "wrote neither"),
    ],
)
async def test_grading_errors_say_what_happened(backend, script, said):
    limits = replace(TASK.limits, verifier_seconds=1)
    with pytest.raises(GradingError, match=said):
        await attempt(backend, replace(TASK, tests={"test.sh": script}, limits=limits), "true")


async def test_evidence(backend):
    script = "#!/usr/bin/env python3\nimport json\nprint('checked')\n"
    script += "json.dump({'reward': 0.25, 'speed': 7}, open('/logs/verifier/reward.json', 'w'))\n"
    script += "tests = [{'name': 'a', 'status': 'passed'}, {'name': 'b', 'status': 'failed'}]\n"
    script += "json.dump({'results': {'tests': tests}}, open('/logs/verifier/ctrf.json', 'w'))\n"
    script += "raise SystemExit(3)\n"
    grade = await attempt(backend, replace(TASK, tests={"test.sh": script}), "true")
    assert grade.reward == 0.25
    evidence = grade.evidence
    assert (evidence["exit_code"], evidence["output"]) == (3, "checked")
    assert evidence["source"] == "/logs/verifier/reward.json"
    assert evidence["metrics"] == {"reward": 0.25, "speed": 7}
    assert evidence["tests"] == {"tests": 2, "passed": 1, "failed": 1, "skipped": 0, "failed_names": ["b"]}
    assert 0 < evidence["seconds"] < 10
