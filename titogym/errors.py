"""The one exception that is meant for the person at the keyboard."""

from pathlib import Path


class UserError(Exception):
    """Something the user can mend: the message is one clear sentence that says what to change.

    The CLI prints it without a traceback and exits with status 2.
    """


def install_extra(name: str) -> str:
    """The command that installs an extra of titogym: from the clone that this is, if it is one."""
    root = Path(__file__).parents[1]
    if (root / "pyproject.toml").is_file():
        return f"pip install -e '{root}[{name}]'"
    return f"pip install 'titogym[{name}]'"
