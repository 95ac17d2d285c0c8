"""Reads task directories in the format of Terminal-Bench 2 and Harbor.

    task.toml  instruction.md  environment/Dockerfile  tests/test.sh  solution/solve.sh

`load_task` understands what a sandbox without images can honestly provide and refuses the rest by
name. Keys that it does not act on are listed in `metadata["unknown_keys"]`: the format evolves.
"""

import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from titogym.envs import dockerfile
from titogym.envs.task import Limits, Task
from titogym.errors import UserError

_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_KNOWN: dict[str, frozenset[str]] = {
    "": frozenset(
        {"version", "schema_version", "task", "metadata", "verifier", "agent", "environment", "solution"}
    )
    | {"source", "artifacts"},
    "agent": frozenset({"timeout_sec", "user", "network_mode", "allowed_hosts"}),
    "verifier": frozenset(
        {"timeout_sec", "env", "user", "network_mode", "allowed_hosts", "environment_mode"}
    ),
    "solution": frozenset({"env"}),
    "environment": frozenset(
        {"build_timeout_sec", "docker_image", "cpus", "memory_mb", "memory", "storage_mb"}
    )
    | {"storage", "env", "workdir", "network_mode", "allow_internet"},
}
# What another backend could do: key -> values that ask for nothing special.
_CONTAINER_KEYS: dict[str, tuple[object, ...]] = {
    "steps": (None, []),
    "agent.user": (None, "root", 0),
    "agent.network_mode": (None,),
    "agent.allowed_hosts": (None, []),
    "verifier.user": (None, "root", 0),
    "verifier.network_mode": (None,),
    "verifier.allowed_hosts": (None, []),
    "verifier.environment": (None,),
    "verifier.environment_mode": (None, "shared"),
    "verifier.collect": (None, []),
    "environment.os": (None, "linux"),
    "environment.gpus": (None, 0),
    "environment.tpu": (None,),
    "environment.mcp_servers": (None, []),
    "environment.healthcheck": (None,),
    "environment.allowed_hosts": (None, []),
}


def is_task_directory(directory: Path) -> bool:
    return (directory / "task.toml").is_file() or (directory / "task.yaml").is_file()


def load_task(directory: Path) -> Task:
    """The task in `directory`. Raises `UserError` naming the file and what to change.

    A task whose image cannot be reproduced without a container engine is refused as well.
    """
    directory = Path(directory).resolve()
    config = _read_config(directory)
    instruction = _read_instruction(directory)
    tests = directory / "tests"
    if not (tests / "test.sh").is_file():
        raise UserError(f"{tests / 'test.sh'} is missing: a task needs a test script that writes its reward.")
    recipe = _read_environment(directory, config)
    environment = config["environment"]
    solution = directory / "solution"
    name = config["task"].get("name")
    reader = _Fields(directory / "task.toml", config)
    return Task(
        id=str(name) if name else directory.name,
        instruction=instruction,
        directory=directory,
        tests=tests,
        solution=solution if (solution / "solve.sh").is_file() else None,
        limits=Limits(
            agent_seconds=reader.number("agent.timeout_sec", Limits().agent_seconds),
            verifier_seconds=reader.number("verifier.timeout_sec", Limits().verifier_seconds),
            memory_mb=reader.megabytes("environment.memory", Limits().memory_mb),
            storage_mb=reader.megabytes("environment.storage", Limits().storage_mb),
            cpus=reader.number("environment.cpus", Limits().cpus),
        ),
        network="open" if _wants_network(environment) else "none",
        workdir=reader.workdir(recipe.workdir),
        env={**recipe.env, **resolve_references(reader.texts("environment.env"), str(reader.path))},
        metadata={
            **config["metadata"],
            "description": config["task"].get("description", ""),
            "schema_version": str(config.get("schema_version") or config.get("version") or ""),
            "base_image": recipe.base,
            "build_seconds": reader.number("environment.build_timeout_sec", 600.0),
            "verifier_env": reader.texts("verifier.env"),
            "solution_env": reader.texts("solution.env"),
            "unknown_keys": sorted(_unknown_keys(config)),
        },
    )


def resolve_references(env: Mapping[str, str], source: str) -> dict[str, str]:
    """Replace `${NAME}` and `${NAME:-default}` in the values by variables of this process."""

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise UserError(f"{source} refers to ${{{match[1]}}}: set the environment variable {match[1]}.")
        return found

    return {name: _REFERENCE.sub(value, text) for name, text in env.items()}


def recipe_of(directory: Path) -> dockerfile.Recipe:
    """The Dockerfile of a task directory, an empty recipe where it has none."""
    path = directory / "environment" / "Dockerfile"
    return dockerfile.parse(_text(path) if path.is_file() else "")


class _Fields:
    """Typed access to `table.key` values of a parsed task.toml."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path, self._config = path, config

    def number(self, key: str, default: float) -> float:
        value = _get(self._config, key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError(f"{self.path}: {key} is {value!r}; it must be a positive number.")
        return value

    def megabytes(self, key: str, default: int) -> int:
        """`key_mb` in MiB, or the older `key` as a text such as "2G"."""
        text = _get(self._config, key)
        if text is None:
            return int(self.number(key + "_mb", default))
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", str(text).strip(), re.IGNORECASE)
        if match is None:
            raise UserError(f'{self.path}: {key} is {text!r}; write a size such as "2G" or "512M".')
        scale = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}[match[2].upper()]
        return max(1, int(float(match[1]) * scale))

    def workdir(self, default: str) -> str:
        value = _get(self._config, "environment.workdir") or default
        parts = PurePosixPath(str(value)).parts
        if parts[0] != "/" or ".." in parts or (parts[1:2] and parts[1] in dockerfile.READ_ONLY):
            raise UserError(
                f"{self.path}: environment.workdir is {value!r}; a sandbox without images needs an absolute "
                "path outside the system's directories."
            )
        return str(value)

    def texts(self, key: str) -> dict[str, str]:
        value = _get(self._config, key) or {}
        if not isinstance(value, dict):
            raise UserError(f"{self.path}: {key} is {value!r}; it must be a table of texts.")
        if bad := [name for name, text in value.items() if not _is_variable(name, str(text))]:
            raise UserError(f"{self.path}: {key} sets {bad[0]!r}, which no process can have as a variable.")
        return {str(name): str(text) for name, text in value.items()}


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "task.toml"
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory.")
    if not path.is_file():
        if (directory / "task.yaml").is_file():
            raise UserError(
                f"{directory / 'task.yaml'} is in the format of Terminal-Bench 1: convert the task to that "
                "of Harbor (task.toml, instruction.md, environment/, tests/)."
            )
        raise UserError(f"{path} is missing: {directory} is not a task directory.")
    try:
        config = tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from None
    for key in ("task", "metadata", "agent", "verifier", "environment", "solution"):
        if not isinstance(config.setdefault(key, {}), dict):
            raise UserError(f"{path}: [{key}] must be a table, not {config[key]!r}.")
    return config


def _read_instruction(directory: Path) -> str:
    path = directory / "instruction.md"
    if not path.exists():
        raise UserError(f"{path} is missing: write there what the agent is to do.")
    lines = _text(path).split("\n")
    while lines and (_CANARY.fullmatch(lines[0].strip()) or not lines[0].strip()):
        del lines[0]
    if not lines:
        raise UserError(f"{path} is empty: write there what the agent is to do.")
    return "\n".join(lines)


def _read_environment(directory: Path, config: dict[str, Any]) -> dockerfile.Recipe:
    """The recipe of the environment. Refuses what needs a container engine."""
    folder = directory / "environment"
    refused = [
        f"{directory / 'task.toml'}: {key} = {_get(config, key)!r}"
        for key, plain in _CONTAINER_KEYS.items()
        if _get(config, key) not in plain
    ]
    if folder.is_dir():
        refused += [
            f"{path} (several containers)" for path in sorted(folder.glob("*compose*.y*ml")) if path.is_file()
        ]
        refused += [str(path) for path in [folder / ".dockerignore"] if path.exists()]
    recipe = recipe_of(directory)
    image = _get(config, "environment.docker_image")
    if not (folder / "Dockerfile").is_file() and image:
        refused.append(f"{directory / 'task.toml'}: environment.docker_image = {image!r}")
    refused += [f"{folder / 'Dockerfile'}, {reason}" for reason in recipe.refused]
    if refused:
        raise UserError(f"This task needs a container backend: {'; '.join(refused)}.")
    for step in recipe.steps:
        if isinstance(step, dockerfile.Copy):
            try:
                dockerfile.sources(folder, step)
            except FileNotFoundError as missing:
                raise UserError(f"{folder / 'Dockerfile'} copies {missing}, which does not exist.") from None
    return recipe


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}.") from None
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from None


def _is_variable(name: str, text: str) -> bool:
    return bool(name) and "=" not in name and "\0" not in name + text


def _wants_network(environment: Mapping[str, Any]) -> bool:
    """Only where the task says so: a sandbox has no network unless asked."""
    return environment.get("network_mode") == "public" or environment.get("allow_internet") is True


def _unknown_keys(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        if key not in _KNOWN[""] and key not in _CONTAINER_KEYS:
            yield key
        if isinstance(value, dict) and key in _KNOWN:
            for inner in value:
                if inner not in _KNOWN[key] and f"{key}.{inner}" not in _CONTAINER_KEYS:
                    yield f"{key}.{inner}"


def _get(config: Mapping[str, Any], key: str) -> Any:
    table, _, name = key.rpartition(".")
    inner = config.get(table, {}) if table else config
    return inner.get(name) if isinstance(inner, dict) else None
