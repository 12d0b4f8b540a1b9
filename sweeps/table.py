"""Tables for people: rich on a terminal, aligned text elsewhere; and numbers as people read them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from attnres.cli import one_line

Row = Sequence[str]


def print_table(title: str, columns: Sequence[str], rows: Sequence[Row], text_columns: Sequence[str]) -> None:
    """Print rows of text. Columns are right-aligned unless they are in `text_columns`.

    Cells come from files, too: what a terminal would obey is written as escapes.
    """
    rows = [[one_line(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(title, columns, rows, text_columns)
    else:
        print(plain_table(title, columns, rows, text_columns))


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Row], text_columns: Sequence[str]) -> str:
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]

    def line(cells: Row) -> str:
        padded = [
            cell.ljust(width) if name in text_columns else cell.rjust(width)
            for cell, width, name in zip(cells, widths, columns, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([title, line(columns), "  ".join("-" * width for width in widths), *map(line, rows)])


def _print_rich(title: str, columns: Sequence[str], rows: Sequence[Row], text_columns: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", header_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name in text_columns else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # Text: a name may hold what rich reads as markup
    Console().print(table)


def number(value: float) -> str:
    """1.23 M rather than 1234567."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """Seconds as people plan with them."""
    if seconds is None:
        return "?"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def gigabytes(count: float | None) -> str:
    """Bytes as people compare them with a machine's memory."""
    if count is None:
        return "?"
    return f"{count / 1e6:.0f} MB" if count < 1e9 else f"{count / 1e9:.3g} GB"
