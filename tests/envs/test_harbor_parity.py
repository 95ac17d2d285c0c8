"""Our reading of task.toml against that of Harbor itself, key by key, on generated files.

Harbor needs Python 3.12 and half a gigabyte. The test takes it from the environment of the harness
Terminus-2, which is Harbor's, or from `$TITOGYM_HARBOR_PYTHON`.
"""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from titogym.envs import task_toml
from titogym.errors import UserError
from titogym.venvs import home

PYTHON = Path(os.environ.get("TITOGYM_HARBOR_PYTHON", home() / "venvs" / "terminus-2" / "bin" / "python"))
pytestmark = pytest.mark.skipif(
    not PYTHON.exists(),
    reason=f"NO HARBOR: {PYTHON} does not exist; run tests/harnesses, or set TITOGYM_HARBOR_PYTHON",
)

HARBOR = """
import json, sys, warnings
warnings.simplefilter("ignore")
from harbor.models.task.config import TaskConfig
for text in json.load(sys.stdin):
    try:
        config = TaskConfig.model_validate_toml(text)
        print(json.dumps(config.model_dump(mode="json")))
    except Exception as error:
        print(json.dumps({"refused": str(error)[:300]}))
"""
# Lines of each table. Every file takes some of them.
TABLES = {
    "": ['schema_version = "1.0"', 'version = "1.3"', 'source = "x/y"', "artifacts = ['/logs/a.txt']"],
    "task": [
        'name = "org/name"',
        'name = "alone"',
        'name = "a/b/c"',
        'description = "d"',
        'keywords = ["k"]',
    ],
    "metadata": ['difficulty = "easy"', "anything = [1, 2]"],
    "verifier": [
        "timeout_sec = 30",
        'timeout_sec = "30"',
        'timeout_sec = "x"',
        'env = { A = "${B:-1}" }',
        "env = { A = 1 }",
        'user = "root"',
        "user = 1000",
        'environment_mode = "shared"',
        'environment_mode = "other"',
        'network_mode = "public"',
    ],
    "agent": ["timeout_sec = 12.5", 'user = "agent"', 'allowed_hosts = ["x.org"]', 'network_mode = "no"'],
    "environment": [
        "build_timeout_sec = 5",
        'docker_image = "a/b:1"',
        "docker_image = 3",
        'os = "LINUX"',
        'os = "beos"',
        "cpus = 2",
        "cpus = 0.5",
        "cpus = inf",
        "memory_mb = 512",
        "memory_mb = 1.5",
        'memory = "2G"',
        'memory = "1.5g"',
        'memory = "12"',
        'storage = "100M"',
        "storage_mb = 100",
        "gpus = 1",
        'env = { K = "v" }',
        'workdir = "/app"',
        'network_mode = "allowlist"\nallowed_hosts = ["A.org.", "*.b.org", "10.0.0.0/8", "2001:DB8::1"]',
        'network_mode = "allowlist"\nallowed_hosts = ["http://a.org"]',
        'network_mode = "allowlist"\nallowed_hosts = ["a.org:80"]',
        'network_mode = "allowlist"\nallowed_hosts = ["*.1.2.3.4"]',
        'network_mode = "allowlist"\nallowed_hosts = ["10.0.0.1/8"]',
        'network_mode = "no-network"',
        'network_mode = "open"',
        "allow_internet = true",
        "allow_internet = false",
        'healthcheck = { command = "true", retries = 5 }',
        "healthcheck = { retries = 5 }",
    ],
    "solution": ['env = { S = "1" }', "env = 3"],
}


def documents(count: int) -> list[str]:
    """Every line alone in its table, then files with several lines."""
    alone = [f"[{table}]\n{line}\n" if table else line for table, lines in TABLES.items() for line in lines]
    chance = random.Random(4)
    mixed = []
    for _ in range(count):
        text = ""
        for table, lines in TABLES.items():
            chosen = chance.sample(lines, chance.choice([0, 0, 1, 1, 2]))
            keys = [line.split(" =")[0] for line in chosen]
            if len(set(keys)) < len(keys):
                continue
            text += (f"[{table}]\n" if table and chosen else "") + "\n".join(chosen) + "\n"
        mixed.append(text)
    return alone + mixed


def ours(text: str) -> dict[str, object] | str:
    try:
        config = task_toml.read(Path("task.toml"), text)
    except UserError as error:
        return str(error)
    environment = config.environment
    return {
        "schema_version": config.schema_version,
        "task": config.task
        and {key: getattr(config.task, key) for key in ("name", "description", "keywords")},
        "metadata": config.metadata,
        "agent": phase(config.agent, "timeout_sec", "user"),
        "verifier": phase(config.verifier, "timeout_sec", "user", "env", "environment_mode"),
        "solution": {"env": config.solution.env},
        "environment": {
            **{
                key: getattr(environment, key)
                for key in ("build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "storage_mb")
            },
            **{key: getattr(environment, key) for key in ("gpus", "env", "workdir")},
            "network_mode": environment.network or "public",
            "allowed_hosts": list(environment.hosts),
            "healthcheck": environment.healthcheck and environment.healthcheck.model_dump(),
        },
    }


def phase(table, *keys):
    return {key: getattr(table, key) for key in keys} | {
        "network_mode": table.network_mode,
        "allowed_hosts": list(table.hosts),
    }


def restricted(theirs: object, shape: object) -> object:
    """What `shape` has of `theirs`."""
    if isinstance(shape, dict) and isinstance(theirs, dict):
        return {key: restricted(theirs.get(key), value) for key, value in shape.items()}
    return [] if theirs is None and shape == [] else theirs


def test_both_read_the_same():
    texts = documents(300)
    done = subprocess.run(
        [str(PYTHON), "-c", HARBOR], input=json.dumps(texts), capture_output=True, text=True, check=True
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(texts)
    agreed = refused = 0
    for text, theirs in zip(texts, answers, strict=True):
        mine = ours(text)
        if isinstance(mine, str):
            assert "refused" in theirs, (text, mine)
            refused += 1
        else:
            assert "refused" not in theirs, (text, theirs)
            assert mine == restricted(theirs, mine), text
            agreed += 1
    assert agreed > 60
    assert refused > 60
