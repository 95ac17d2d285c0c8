"""Reads task directories in the format of Terminal-Bench 2 and Harbor.

    task.toml  instruction.md  environment/Dockerfile  tests/test.sh  solution/solve.sh

`load_task` understands what one sandbox can honestly provide and refuses the rest by name. Whether a task
can do without an image is in `metadata["needs_image"]`; keys that are not acted on are listed in
`metadata["unknown_keys"]`: the format evolves.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from titogym.envs import dockerfile, scrub, task_toml
from titogym.envs.task import AllowList, Limits, Network, Task
from titogym.envs.task_toml import TaskToml
from titogym.errors import UserError

DOCKERFILE = "environment/Dockerfile"
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def is_task_directory(directory: Path) -> bool:
    return (directory / "task.toml").is_file() or (directory / "task.yaml").is_file()


def load_task(directory: Path) -> Task:
    """The task in `directory`. Raises `UserError` naming the file and what to change."""
    directory = Path(directory).resolve()
    path = directory / "task.toml"
    config = _read_config(directory)
    if reasons := list(_unsupported(directory, config)):
        raise UserError(
            f"titogym does not run this task, which needs what it does not have: {'; '.join(reasons)}."
        )
    instruction = _read_instruction(directory)
    tests = directory / "tests"
    if not (tests / "test.sh").is_file():
        raise UserError(f"{tests / 'test.sh'} is missing: a task needs a test script that writes its reward.")
    context = directory / "environment"
    recipe = dockerfile.read(context)
    needs_image = list(_beyond_a_plain_system(path, config, recipe))
    # Where the task is silent, Harbor's default is the open network, and tests of tasks with an image
    # commonly install what they need; a task that a plain system can run needs none, and gets none.
    silent: task_toml.NetworkMode = "public" if needs_image else "no-network"
    network = _network(config.environment.network or silent, config.environment.hosts)
    _check_phases(path, config, network)
    solution = directory / "solution"
    environment = config.environment
    return Task(
        id=config.task.name if config.task else directory.name,
        instruction=instruction,
        directory=directory,
        tests=tests,
        solution=solution if (solution / "solve.sh").is_file() else None,
        limits=Limits(
            agent_seconds=config.agent.timeout_sec or Limits().agent_seconds,
            verifier_seconds=config.verifier.timeout_sec,
            memory_mb=environment.memory_mb or Limits().memory_mb,
            storage_mb=environment.storage_mb or Limits().storage_mb,
            cpus=environment.cpus or Limits().cpus,
        ),
        # A plain system with the Dockerfile's files needs no image; else what was built before is pulled.
        image=environment.docker_image if needs_image else None,
        context=context if (context / "Dockerfile").is_file() else None,
        network=network,
        workdir=_workdir(path, environment.workdir or recipe.workdir, plain=not needs_image),
        env={**({} if needs_image else recipe.env), **resolve_references(environment.env, str(path))},
        metadata={
            **config.metadata,
            "description": config.task.description if config.task else "",
            "schema_version": config.schema_version,
            "base_image": recipe.base,
            "build_seconds": environment.build_timeout_sec,
            "needs_image": needs_image,
            "verifier_env": dict(config.verifier.env),
            "solution_env": dict(config.solution.env),
            "healthcheck": environment.healthcheck and environment.healthcheck.model_dump(),
            "scrub": scrub.declared(path, config.metadata),
            "unknown_keys": sorted({*config.unknown(), *_not_acted_on(config)}),
        },
    )


def need_images(tasks: Iterable[Task]) -> list[tuple[Task, str]]:
    """Those of the tasks that a plain system cannot run, each with the first reason."""
    return [(task, reasons[0]) for task in tasks if (reasons := task.metadata.get("needs_image"))]


def resolve_references(env: Mapping[str, str], source: str) -> dict[str, str]:
    """Replace `${NAME}` and `${NAME:-default}` in the values by variables of this process."""

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise UserError(f"{source} refers to ${{{match[1]}}}: set the environment variable {match[1]}.")
        return found

    return {name: _REFERENCE.sub(value, text) for name, text in env.items()}


def _unsupported(directory: Path, config: TaskToml) -> Iterator[str]:
    """What no backend of ours can do, each with the file and the key that ask for it."""
    environment, verifier = config.environment, config.verifier
    wanted: dict[str, object] = {
        "steps": config.steps or None,
        "agent.user": None if config.agent.user in (None, "root", 0) else config.agent.user,
        "verifier.user": None if verifier.user in (None, "root", 0) else verifier.user,
        "verifier.environment": verifier.environment,
        "verifier.environment_mode": verifier.environment_mode
        if verifier.environment_mode == "separate"
        else None,
        "verifier.collect": verifier.collect or None,
        "environment.os": None if environment.os == "linux" else environment.os,
        "environment.gpus": environment.gpus or None,
        "environment.tpu": environment.tpu,
        "environment.mcp_servers": environment.mcp_servers or None,
    }
    for key, value in wanted.items():
        if value is not None:
            yield f"{directory / 'task.toml'}: {key} = {_shorten(repr(value))}"
    for path in sorted((directory / "environment").glob("*compose*.y*ml")):
        if path.is_file():
            yield f"{path} (several containers)"


def _beyond_a_plain_system(path: Path, config: TaskToml, recipe: dockerfile.Recipe) -> Iterator[str]:
    """What a sandbox without images could not reproduce of this task's image."""
    image = config.environment.docker_image
    if image and not (path.parent / DOCKERFILE).is_file():
        yield f"{path}: environment.docker_image = {image!r}"
    yield from recipe.refused


def _network(mode: task_toml.NetworkMode, hosts: tuple[str, ...]) -> Network:
    if mode == "allowlist":
        return AllowList(hosts)
    return "open" if mode == "public" else "none"


def _check_phases(path: Path, config: TaskToml, network: Network) -> None:
    """One sandbox has one network policy: a phase may repeat it, not change it."""
    for name, phase in (("agent", config.agent), ("verifier", config.verifier)):
        if phase.network_mode and _network(phase.network_mode, phase.hosts) != network:
            raise UserError(
                f"{path}: {name}.network_mode = {phase.network_mode!r} differs from the environment's; "
                "titogym gives agent and tests the same network: set environment.network_mode alone."
            )


def _workdir(path: Path, workdir: str, *, plain: bool) -> str:
    parts = PurePosixPath(workdir)
    if not parts.is_absolute() or ".." in parts.parts:
        raise UserError(f"{path}: environment.workdir is {workdir!r}; it must be an absolute path.")
    if plain and parts.parts[1:2] and parts.parts[1] in dockerfile.READ_ONLY:
        raise UserError(
            f"{path}: environment.workdir is {workdir!r}; a sandbox without images needs an absolute "
            "path outside the system's directories."
        )
    return workdir


def _not_acted_on(config: TaskToml) -> Iterator[str]:
    """Keys of the schema that change nothing about the reward here."""
    if config.artifacts:
        yield "artifacts"
    if config.environment.skills_dir:
        yield "environment.skills_dir"
    if config.environment.gpu_types:
        yield "environment.gpu_types"


def _read_config(directory: Path) -> TaskToml:
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
    return task_toml.read(path, _text(path))


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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}.") from None
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from None


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
