"""Tables of things that the next command names: names are folded, never cut."""

import os

from rich.console import Console
from rich.table import Table

_UNBOUNDED = 100_000  # characters


def print_table(console: Console, table: Table, *names: str) -> None:
    """Print `table`, whose columns with the headings `names` may be folded into lines, but not shortened.

    Into a pipe or a file it is as wide as it needs to be, unless COLUMNS says how wide.
    """
    for column in table.columns:
        if column.header in names:
            column.overflow = "fold"
    width = console.width
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNBOUNDED
    console.print(table)
    console.width = width
