"""Names in tables stay whole, wherever they are printed."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from titogym.cli.tables import print_table

NAME = "0123456789" * 9


def printed(**options) -> str:
    out = io.StringIO()
    table = Table("name", "labels")
    table.add_row(NAME, "task=csv-totals " * 6)
    print_table(Console(file=out, color_system=None, **options), table, "name")
    return out.getvalue()


def test_in_a_pipe_a_row_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = printed().splitlines()
    assert len(lines) == 5
    assert NAME in lines[3]
    assert len(set(map(len, lines))) == 1


def test_on_a_terminal_a_name_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = printed(force_terminal=True, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    cells = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert "".join(cells) == NAME
