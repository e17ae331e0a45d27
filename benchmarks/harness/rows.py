"""A table as rows of text, for terminals and documents."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

BORDERS = 3
"""Characters that a column takes beside its text: two blanks and a line."""


@dataclass(frozen=True)
class Rows:
    """Its title, column heads, and rows of as many cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def show(self, console: Console) -> None:
        """Print it. In a terminal that is too narrow, as several tables, each of which begins with the first column.

        Cells are never cut: a number that is cut short is another number. A file has no width.
        """
        if not console.is_terminal:
            console.width = max(console.width, 1 + sum(map(self._widest, range(len(self.columns)))))
        for number, part in enumerate(self.parts(console.width)):
            fits = 1 + sum(map(self._widest, part)) <= console.width
            table = Table(title=self.title if number == 0 else f"{self.title} (continued)")
            for column in part:
                width = self._widest(column) if fits else self._narrowest(column)
                table.add_column(self.columns[column], justify="right" if column else "left", width=width - BORDERS)
            for row in self.rows:
                table.add_row(*(row[column] for column in part))
            console.print(table)

    def parts(self, width: int) -> list[list[int]]:
        """Places of the columns of each table of at most `width` characters, heads broken between words."""
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

    def markdown(self) -> str:
        """Without the title; ends with a line break."""
        lines = [self.columns, ("---", *["---:"] * (len(self.columns) - 1)), *self.rows]
        return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
