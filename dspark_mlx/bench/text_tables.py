"""Plain text tables (laid out by rich), and numbers as their cells show them."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

DASH = "–"  # a cell without a value
LONGEST_LINE = 10_000  # characters: a table is never folded, whatever the terminal


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart, the first aligned left, the others right.

    A column whose every cell is a dash is left out.
    """
    shown = [i for i in range(len(head)) if i == 0 or any(row[i] != DASH for row in rows)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="none")
    for i in shown:
        table.add_column(head[i], justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    out = io.StringIO()
    console = Console(file=out, width=LONGEST_LINE, no_color=True, markup=False, highlight=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def number(value: float | None, digits: int = 2) -> str:
    return DASH if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.0f} %"


def spread(low: float | None, high: float | None, digits: int = 1) -> str:
    if low is None or high is None:
        return DASH
    return f"{low:.{digits}f}–{high:.{digits}f}"


def plural(count: int, word: str, many: str | None = None) -> str:
    return f"{count} {word if count == 1 else many or word + 's'}"
