"""What every chart is drawn with: title row, axis, lines, bars, curves and marks on a canvas.

The functions here know cells and shares of a plot, not the statistics. The plot begins below the
title and ``AXIS`` cells from the left.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..canvas import Canvas

AXIS = 5  # cells left of the plot
Series = tuple[Sequence[float | None], str]


def number(value: float | None, digits: int = 1, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def title(
    canvas: Canvas,
    name: str,
    value: str | Sequence[str] = "",
    legend: Sequence[tuple[str, str]] = (),
) -> None:
    """The title row. Of several values, longest first, the first that fits is shown."""
    x = canvas.text(0, 0, name, "title")
    values = [value] if isinstance(value, str) else value
    fitting = next((text for text in values if x + len(text) + 2 <= canvas.width), "")
    canvas.right(0, fitting, "value")
    for text, style in legend:
        if x + len(text) + 2 + len(fitting) >= canvas.width:
            break
        x = canvas.text(x + 1, 0, text, style)


def axis(canvas: Canvas, top: str, bottom: str = "0") -> None:
    last = canvas.height - 1
    canvas.right(1, top, "axis", AXIS - 1)
    if last > 1:
        canvas.right(last, bottom, "axis", AXIS - 1)
    for y in range(1, canvas.height):
        canvas.text(AXIS - 1, y, "┤" if y in (1, last) else "│", "axis")


def lines(canvas: Canvas, series: Sequence[Series], top: float, low: float = 0.0) -> None:
    """Plot right-aligned series, one dot column a round, below the title."""
    left, dots_high = 2 * AXIS, 4 * (canvas.height - 1)
    room = 2 * (canvas.width - AXIS)
    if room <= 0 or dots_high <= 0 or top <= low:
        return
    for values, style in series:
        shown = list(values)[-room:]
        start = left + room - len(shown)
        before: tuple[int, int] | None = None
        for i, value in enumerate(shown):
            if value is None:
                before = None
                continue
            share = max(0.0, min(1.0, (value - low) / (top - low)))
            at = (start + i, 4 + round((dots_high - 1) * (1 - share)))
            if before:
                canvas.segment(*before, *at, style)
            else:
                canvas.dot(*at, style)
            before = at


def level(canvas: Canvas, value: float | None, top: float, style: str) -> None:
    """A dashed line across the plot at ``value``."""
    if value is None or not 0 <= value <= top:
        return
    dots_high = 4 * (canvas.height - 1)
    y = 4 + round((dots_high - 1) * (1 - value / top))
    for x in range(2 * AXIS, 2 * canvas.width):
        if x % 6 < 3:
            canvas.dot(x, y, style)


def bars(canvas: Canvas, shares: Sequence[float | None], first: int, style: str) -> None:
    """Columns with their numbers below and, where there is room, their values inside the plot."""
    room, high = canvas.width - AXIS, canvas.height - 2
    if not shares or room <= 0 or high <= 0:
        return
    step = max(1, room // len(shares))
    wide = max(1, step - 1) if step > 1 else 1
    for i, share in enumerate(shares):
        x = AXIS + i * step
        if x + wide > canvas.width:
            break
        if share is not None:
            canvas.column(x, 1, high, share, style, wide)
        if step > 1 or i % 2 == 0:
            canvas.text(x, canvas.height - 1, str(first + i)[-wide:], "axis")


def _plot(canvas: Canvas, point: tuple[float, float]) -> tuple[int, int]:
    """The dot of a point given in shares of the plot, whose last row is the x axis."""
    wide, high = 2 * (canvas.width - AXIS) - 2, 4 * (canvas.height - 2) - 1
    x = 2 * AXIS + round(point[0] * wide)
    return x, 4 + round((1 - max(0.0, min(1.0, point[1]))) * high)


def curve(canvas: Canvas, points: Sequence[tuple[float, float]], style: str) -> None:
    dots = [_plot(canvas, point) for point in points]
    for before, at in itertools.pairwise(dots):
        canvas.segment(*before, *at, style)


def mark(canvas: Canvas, point: tuple[float, float], char: str, style: str) -> None:
    x, y = _plot(canvas, point)
    canvas.text(x // 2, y // 4, char, style)


def x_labels(canvas: Canvas, low: int, high: int) -> None:
    y = canvas.height - 1
    canvas.text(0, y, " " * canvas.width)
    canvas.text(AXIS, y, str(low), "axis")
    canvas.right(y, str(high), "axis")
