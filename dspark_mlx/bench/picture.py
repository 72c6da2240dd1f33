"""Charts as SVG text: lines, bars and steps on a plain axis. Knows nothing of what it draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

# Okabe and Ito's palette: told apart with any kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8A8A00")
WIDTH, HEIGHT = 760, 320
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 44, 46
TICKS = 5
TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart; ``step`` keeps each value until the next."""

    name: str
    points: tuple[tuple[float, float], ...]
    step: bool = False


@dataclass(frozen=True, slots=True)
class Lines:
    """A line chart. ``bands`` are shaded stretches of x, each with a word on it."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    bands: tuple[tuple[float, float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Bars:
    """Groups of bars. ``values[g][s]`` is series s in group g, or None.

    ``spread[g][s]`` (low, high) is drawn as a whisker.
    """

    title: str
    y_label: str
    groups: tuple[str, ...]
    series: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    spread: tuple[tuple[tuple[float, float] | None, ...], ...] = field(default=())


Chart = Lines | Bars


def page(charts: Sequence[Chart], note: str = "") -> str:
    """One SVG document with the charts below each other and a line of text under them."""
    height = HEIGHT * len(charts) + (24 if note else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for i, chart in enumerate(charts):
        body = _lines(chart) if isinstance(chart, Lines) else _bars(chart)
        parts.append(f'<g transform="translate(0 {i * HEIGHT})">{body}</g>')
    if note:
        parts.append(_text(LEFT, height - 9, note, colour="#555555", size=11))
    return "\n".join([*parts, "</svg>"]) + "\n"


@dataclass(frozen=True, slots=True)
class _Axes:
    """Data to pixels."""

    x0: float
    x1: float
    y1: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.y1 * (HEIGHT - TOP - BOTTOM)


def _lines(chart: Lines) -> str:
    points = [p for s in chart.series for p in s.points if all(map(math.isfinite, p))]
    xs = [x for x, _ in points] or [0.0]
    axes = _Axes(min(xs), max(xs) if max(xs) - min(xs) > TINY else min(xs) + 1.0, _top(points))
    parts = [_text(LEFT, 22, chart.title, weight="bold", size=14)]
    for start, end, word in chart.bands:
        a, b = axes.x(start), axes.x(end)
        parts.append(
            f'<rect x="{a:.1f}" y="{TOP}" width="{max(0.0, b - a):.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}" fill="#f0e4c8"/>'
        )
        parts.append(_text((a + b) / 2, TOP + 14, word, anchor="middle", colour="#7a5c00"))
    parts.append(_frame(axes, chart.y_label))
    for value in _ticks(axes.x0, axes.x1):
        parts.append(_text(axes.x(value), HEIGHT - BOTTOM + 17, f"{value:g}", anchor="middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 10, chart.x_label, anchor="middle", colour="#555555"))
    for i, series in enumerate(chart.series):
        colour = COLOURS[i % len(COLOURS)]
        path = _path(series, axes)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if not series.step and len(series.points) <= 20:
            parts += [
                f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3" fill="{colour}"/>'
                for x, y in series.points
                if math.isfinite(y)
            ]
        parts.append(_legend(i, series.name, colour))
    return "".join(parts)


def _path(series: Series, axes: _Axes) -> str:
    parts: list[str] = []
    last: float | None = None
    for x, y in series.points:
        if not math.isfinite(y):  # a gap
            last = None
            continue
        px, py = axes.x(x), axes.y(y)
        if last is None:
            parts.append(f"M{px:.1f} {py:.1f}")
        elif series.step:
            parts.append(f"H{px:.1f}V{py:.1f}")
        else:
            parts.append(f"L{px:.1f} {py:.1f}")
        last = y
    return "".join(parts)


def _bars(chart: Bars) -> str:
    tops = [v for row in chart.values for v in row if v is not None]
    tops += [pair[1] for row in chart.spread for pair in row if pair is not None]
    axes = _Axes(0.0, float(max(1, len(chart.groups))), _top([(0.0, v) for v in tops]))
    parts = [_text(LEFT, 22, chart.title, weight="bold", size=14), _frame(axes, chart.y_label)]
    room = (axes.x(1) - axes.x(0)) * 0.84
    wide = room / max(1, len(chart.series))
    for g, group in enumerate(chart.groups):
        start = axes.x(g) + (axes.x(1) - axes.x(0) - room) / 2
        centre = axes.x(g + 0.5)
        parts.append(_text(centre, HEIGHT - BOTTOM + 17, group, anchor="middle"))
        for s, value in enumerate(chart.values[g]):
            if value is None:
                continue
            x, y = start + s * wide, axes.y(value)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(1.0, wide - 2):.1f}" '
                f'height="{max(0.0, axes.y(0) - y):.1f}" fill="{COLOURS[s % len(COLOURS)]}"/>'
            )
            pair = chart.spread[g][s] if chart.spread else None
            if pair is not None:
                mid = x + (wide - 2) / 2
                parts.append(
                    f'<path d="M{mid:.1f} {axes.y(pair[0]):.1f}V{axes.y(pair[1]):.1f}" '
                    'stroke="#333333" stroke-width="1.2"/>'
                )
    parts += [_legend(i, n, COLOURS[i % len(COLOURS)]) for i, n in enumerate(chart.series)]
    return "".join(parts)


def _frame(axes: _Axes, y_label: str) -> str:
    right = WIDTH - RIGHT
    parts = [_text(LEFT, 38, y_label, colour="#555555", size=11)]
    for value in _ticks(0.0, axes.y1):
        y = axes.y(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 7, y + 4, f"{value:g}", anchor="end"))
    parts.append(f'<path d="M{LEFT} {HEIGHT - BOTTOM}H{right}" stroke="#333333"/>')
    return "".join(parts)


def _legend(i: int, name: str, colour: str) -> str:
    x, y = WIDTH - RIGHT + 14, TOP + 4 + 18 * i
    return f'<rect x="{x}" y="{y}" width="11" height="11" fill="{colour}"/>' + _text(
        x + 17, y + 10, name
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    colour: str = "#222222",
    size: int = 12,
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
        f'font-size="{size}" font-weight="{weight}">{escape(text)}</text>'
    )


def _top(points: Sequence[tuple[float, float]]) -> float:
    """A little above the largest value; 1 where there is none worth a scale."""
    largest = max((y for _, y in points), default=0.0)
    return 1.06 * largest if largest > TINY else 1.0


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers in [low, high]."""
    raw = (high - low) / TICKS
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(m * scale for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * scale >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]
