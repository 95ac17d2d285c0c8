"""Finds sandbox backends by name: built in, from entry points, or by dotted path."""

import inspect
from importlib.metadata import entry_points
from typing import Any

from titogym import dotted, options
from titogym.envs.sandboxes.base import SandboxBackend
from titogym.errors import UserError

BACKENDS = {
    "local": "titogym.envs.sandboxes.local:LocalBackend",
    "docker": "titogym.envs.sandboxes.docker.backend:DockerBackend",
    "daytona": "titogym.envs.sandboxes.daytona.backend:DaytonaBackend",
}
GROUP = "titogym.sandboxes"


def backends() -> dict[str, str]:
    """Name -> where it is defined."""
    return {**{point.name: point.value for point in entry_points(group=GROUP)}, **BACKENDS}


def backend(name: str, **given: Any) -> SandboxBackend:
    """The backend of this name, entry point or dotted path (`package.module:Class`), with its options.

    Every backend takes `labels`, a mapping that all its sandboxes bear. Raises `UserError`.
    """
    known = backends()
    if name not in known and ":" not in name and "." not in name:
        raise UserError(
            f"There is no sandbox backend {name!r}: choose one of {', '.join(sorted(known))}, or a dotted "
            "path."
        )
    kind = dotted.load(known.get(name, name), "sandbox backend")
    parameters = inspect.signature(kind).parameters
    for option in given:
        if option not in parameters:
            raise UserError(
                f"The sandbox backend {name!r} has no option {option!r}; it has {', '.join(parameters)}."
            )
    made: SandboxBackend = kind(**options.fitted(kind, given, f"The sandbox backend {name!r}"))
    return made
