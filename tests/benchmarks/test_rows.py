"""Tables in terminals and files: nothing is ever cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.harness.rows import Rows

ROWS = Rows(
    "times",
    ("pool", "time to first token", "retractions", "accuracy"),
    (("token", "1,234.5", "0", "0.500 (0.25-0.75)"), ("ragged@0.3", "98,765.4", "12", "0.250 (0.10-0.40)")),
)
CELLS = {cell for row in ROWS.rows for cell in row}


def shown(width: int | None) -> list[str]:
    """Lines of the table in a terminal of this width, or in a file."""
    console = Console(file=io.StringIO(), force_terminal=width is not None, no_color=True, width=width)
    ROWS.show(console)
    return console.file.getvalue().splitlines()


def test_a_file_gets_one_wide_table():
    lines = shown(None)
    heads = [line for line in lines if "pool" in line]
    assert len(heads) == 1
    assert all(column in heads[0] for column in ROWS.columns)
    assert all(any(cell in line for line in lines) for cell in CELLS)


@pytest.mark.parametrize("width", [34, 40, 60, 200])
def test_a_terminal_gets_as_many_tables_as_it_needs(width):
    lines = shown(width)
    assert all(any(cell in line for line in lines) for cell in CELLS)
    visible = [line for line in lines if line[:1] in "┏┃┡│└"]
    assert max(len(line) for line in visible if "[" not in line) <= width
    assert sum("ragged@0.3" in line for line in lines) == len(ROWS.parts(width))


def test_every_column_is_in_one_table_after_the_first_column():
    for width in (10, 40, 60, 200):
        parts = ROWS.parts(width)
        assert [place for part in parts for place in part[1:]] == [1, 2, 3]
        assert all(part[0] == 0 for part in parts)
    assert len(ROWS.parts(200)) == 1
