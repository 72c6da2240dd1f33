"""Plain text tables: aligned columns, numbers to the right. Knows nothing of what it shows."""

from __future__ import annotations

from collections.abc import Sequence

DASH = "–"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Columns two spaces apart; the first is left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return (indent + "  ".join([first, *rest])).rstrip()

    return "\n".join(line(cells) for cells in (head, *rows))


def without_blanks(
    head: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """Leaves out the columns in which every cell is a dash."""
    keep = [i for i in range(len(head)) if i == 0 or any(row[i] != DASH for row in rows)]
    return [head[i] for i in keep], [[row[i] for i in keep] for row in rows]


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
