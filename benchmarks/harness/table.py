"""The writer of tables: cells of text, printed to a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import rich.table
from rich.console import Console

BORDERS = 3
"""Characters that a column takes in addition to its text: two blanks and a line."""


@dataclass(frozen=True)
class Table:
    """A title, column heads, and rows with one cell for each column. The first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def show(self, console: Console) -> None:
        """Print the table; in a terminal that is too narrow, as several, each of which begins with the first column.

        Cells are never cut: a number that is cut short is another number. A file has no width.
        """
        if not console.is_terminal:
            console.width = max(console.width, 1 + sum(map(self._widest, range(len(self.columns)))))
        for number, part in enumerate(self.parts(console.width)):
            fits = 1 + sum(map(self._widest, part)) <= console.width
            shown = rich.table.Table(title=self.title if number == 0 else f"{self.title} (continued)")
            for column in part:
                width = self._widest(column) if fits else self._narrowest(column)
                shown.add_column(self.columns[column], justify="right" if column else "left", width=width - BORDERS)
            for row in self.rows:
                shown.add_row(*(row[column] for column in part))
            console.print(shown)

    def parts(self, width: int) -> list[list[int]]:
        """Column indices of each printed table of at most `width` characters, heads broken between words."""
        made = [[0]]
        for column in range(1, len(self.columns)):
            if 1 + sum(map(self._narrowest, [*made[-1], column])) > width and len(made[-1]) > 1:
                made.append([0])
            made[-1].append(column)
        return made

    def _narrowest(self, column: int) -> int:
        words = self.columns[column].split()
        return BORDERS + max(len(text) for text in (*words, *self._cells(column)))

    def _widest(self, column: int) -> int:
        return BORDERS + max(len(text) for text in (self.columns[column], *self._cells(column)))

    def _cells(self, column: int) -> list[str]:
        return [row[column] for row in self.rows]
