"""Finding a user's own code by its dotted path, for every extension point."""

import os
import sys
from importlib import import_module
from typing import Any

from titogym.errors import UserError


def load(path: str, what: str) -> Any:
    """The object at `package.module:name` (or `package.module.name`).

    The current directory is searched too, so that a module beside the configuration is found. `what`
    names the extension point in the message. Raises `UserError` when there is no such object.
    """
    module_name, _, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if not module_name or not name or module_name.startswith("."):
        raise UserError(f"{what} {path!r} is not a dotted path: write package.module:name.")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Any = import_module(module_name)
    except Exception as error:  # a module may fail in any way while it is executed
        raise UserError(f"{what} {path!r} cannot be imported: {type(error).__name__}: {error}.") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(f"{what} {path!r}: {module_name} has no {name!r}.")
        found = getattr(found, part)
    return found
