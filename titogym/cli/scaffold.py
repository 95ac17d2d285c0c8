"""A package with an environment of one's own, to begin from."""

import keyword
import re
import sys
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from titogym.errors import UserError

# template -> where it goes; {name} is the package
FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "__init__.py": "{name}/__init__.py",
    "environment.py": "{name}/environment.py",
    "tasks.py": "{name}/tasks.py",
    "test_environment.py": "tests/test_environment.py",
}


def scaffold(name: str, parent: Path) -> list[Path]:
    """Write the package `name` into `parent`/`name`, and return its files.

    Raises `UserError` for a name that no package can have, or a folder that is there already.
    """
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module) or keyword.iskeyword(module):
        raise UserError(f"{name!r} cannot name a Python package: use small letters, digits and underscores.")
    if module in sys.stdlib_module_names or module in ("titogym", "tests"):
        raise UserError(f"A package {module!r} would hide another one: choose a name of its own.")
    folder = parent / name
    if folder.exists():
        raise UserError(f"{folder} is there already.")
    templates = Environment(
        loader=PackageLoader("titogym.envs", "scaffold"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    values = {
        "name": module,
        "distribution": module.replace("_", "-"),
        "class_name": "".join(part.capitalize() for part in module.split("_")),
    }
    written = []
    try:
        for template, target in FILES.items():
            path = folder / target.format(name=module)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(templates.get_template(f"{template}.jinja").render(values), encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}.") from error
    return written
