"""A task: one prompt with its environment, limits and grader."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Limits:
    """Per-episode limits. Times in seconds, memory and disk in MiB."""

    turns: int = 50
    tokens: int | None = None  # sampled tokens over the whole episode
    agent_seconds: float = 600.0
    verifier_seconds: float = 120.0
    memory_mb: int = 2048
    storage_mb: int = 2048
    cpus: float = 1.0
    processes: int = 128


@dataclass(frozen=True, slots=True)
class AllowList:
    """A network that ends at a proxy, which connects to these hosts and no other.

    `example.org` is that very name, `*.example.org` every name below it; an address or a range such as
    `10.0.0.0/8` stands for itself. A name that leads to an address that is not public is refused unless
    the address is listed too. Programs find the proxy by HTTP_PROXY and HTTPS_PROXY.
    """

    hosts: tuple[str, ...]


Network = Literal["none", "open"] | AllowList


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt with what its environment and grader need.

    `files` is a tree laid into the work directory before the agent starts; `tests` (never visible to
    the agent) and `solution` are directories on the driver's disk, or None where the environment has
    another grader. Everything is data: a `Task` can be pickled and sent to another host.
    """

    id: str
    instruction: str
    environment: str = "terminal"
    files: dict[str, str] = field(default_factory=dict)  # path relative to the work directory -> text
    directory: Path | None = None  # the task directory on disk, for terminal-bench tasks
    image: str | None = None  # an image to pull
    context: Path | None = None  # else the directory with the Dockerfile that the image is built from
    tests: dict[str, str] | Path | None = None  # file tree, or directory that holds it
    solution: dict[str, str] | Path | None = None
    limits: Limits = Limits()
    network: Network = "none"
    workdir: str = "/workspace"
    env: dict[str, str] = field(default_factory=dict)
    split: Literal["train", "test"] = "train"
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Grade:
    """A verified reward: finite and within [0, 1]. `evidence` says how it came about."""

    reward: float
    evidence: dict[str, Any] = field(default_factory=dict)


class GradingError(Exception):
    """Grading gave no valid reward (missing, non-finite, out of range, crashed). Never a number."""
