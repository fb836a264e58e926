"""Consoles and tables for terminals.

Names and paths may contain brackets, so strings are never parsed as markup; styled text is a
:class:`rich.text.Text`. A table that is wider than the terminal is printed as a list with one line per cell. In files
and pipes, tables are as wide as their content.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import IO, Any

from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ls_edge.core.errors import printable

FILE_WIDTH = 10_000
"""Width in columns of files and pipes, so that nothing is wrapped or truncated."""


def open_console(*, stderr: bool = False, file: IO[str] | None = None) -> Console:
    """Return a console on standard output or error, or a file, without markup and automatic highlighting."""
    console = Console(stderr=stderr, file=file, markup=False, highlight=False, emoji=False, soft_wrap=True)
    if not console.is_terminal or not console.width:  # COLUMNS=0
        console.width = FILE_WIDTH
    return console


class PlainTable(Table):
    """Table in the style of ls-edge; strings are escaped and not parsed as markup, and long words are folded."""

    def __init__(self, *headings: str, rows: Iterable[Sequence[RenderableType]] = (), **options: Any) -> None:
        """Make a table; a heading with a leading ``>`` is of a right-aligned column of numbers that never folds."""
        look = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "header_style": "dim"}
        super().__init__(**{**look, **options})
        for heading in headings:
            name = heading.removeprefix(">")
            self.add_column(
                name,
                justify="left" if name == heading else "right",
                no_wrap=name != heading,
                overflow="fold",
            )
        for cells in rows:
            self.add_row(*cells)

    @classmethod
    def of_facts(cls, facts: Iterable[tuple[str, RenderableType]]) -> PlainTable:
        """Return a table of names and their values, without headings."""
        table = cls(show_header=False)
        table.add_column("", style="dim", no_wrap=True, overflow="fold")
        table.add_column("", overflow="fold")
        for fact in facts:
            table.add_row(*fact)
        return table

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row."""
        super().add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells), **options)


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table, or a list of its cells if the terminal is too narrow."""
    console = console or open_console()
    if not console.is_terminal:
        table.box = None
    if fits(table, console):
        with console.capture() as rendered:
            console.print(table, soft_wrap=False, markup=False, highlight=False)
        for row in rendered.get().splitlines():  # without the blanks that fill the last column
            console.file.write(f"{row.rstrip()}\n")
        return
    for line in as_list(table):
        console.print(line, soft_wrap=False, overflow="fold", markup=False, highlight=False)


def fits(table: Table, console: Console) -> bool:
    """Return whether a table fits the width of the terminal."""
    return Measurement.get(console, console.options.update(width=FILE_WIDTH), table).minimum <= console.width


def as_list(table: Table) -> list[Text]:
    """Return the cells of a table as lines ``heading: cell``; all but the first cell of a row are indented."""
    lines: list[Text] = []
    columns = [(_text(column.header).plain, [_text(cell) for cell in column.cells]) for column in table.columns]
    headed = table.show_header and any(header for header, _ in columns)
    for number in range(table.row_count):
        row = [(header if headed else "", cells[number]) for header, cells in columns]
        if not headed and len(row) > 1:  # the first cell is the name of the second
            row = [(row[0][1].plain, row[1][1]), *row[2:]]
        shown = [(header, cell) for header, cell in row if cell.plain]
        for place, (header, cell) in enumerate(shown):
            lines.append(Text.assemble("  " if place else "", f"{header}: " if header else "", cell))
    return lines


def _text(cell: RenderableType) -> Text:
    return cell if isinstance(cell, Text) else Text(printable(cell))
