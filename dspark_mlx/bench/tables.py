"""Plain text tables: aligned columns, numbers to the right. Knows nothing of what it shows."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Columns two spaces apart; the first is left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return (indent + "  ".join([first, *rest])).rstrip()

    return "\n".join(line(cells) for cells in (head, *rows))


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def spread(low: float | None, high: float | None, digits: int = 1) -> str:
    if low is None or high is None:
        return "–"
    return f"{low:.{digits}f}–{high:.{digits}f}"


def plural(count: int, word: str, many: str | None = None) -> str:
    return f"{count} {word if count == 1 else many or word + 's'}"
