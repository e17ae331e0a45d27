"""A table as rows of text, for terminals and documents."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True)
class Rows:
    """Its title, column heads, and rows of as many cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def rich(self) -> Table:
        """For the terminal: the first column is text, the others are numbers."""
        table = Table(title=self.title)
        for number, column in enumerate(self.columns):
            # Folded where a terminal is narrow: a number that is cut short is another number.
            justify = "left" if number == 0 else "right"
            table.add_column(column, justify=justify, no_wrap=number == 0, overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Without the title; ends with a line break."""
        lines = [self.columns, ("---", *["---:"] * (len(self.columns) - 1)), *self.rows]
        return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
