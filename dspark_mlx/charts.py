"""Charts as SVG text: lines, steps, dots and bars, in one page of panels.

    page([LineChart("Loss", "step", "nats", (Series("training", ((0, 2.1), (1, 1.9))),))])

A page follows the reader's light or dark colour scheme. Pure: numbers in, text out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from xml.sax.saxutils import escape

Point = tuple[float, float]
Legend = Literal["right", "below", "shared"]

# Okabe and Ito's palette: told apart with any kind of colour vision. For a light page and a dark
# one; only what would vanish against the background differs.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#333333", "#8A8A00")
DARK_COLOURS = (
    "#3D9BDC", "#F07F3C", "#2BBF97", "#DD95BD", "#7CC6F2", "#F0B93A", "#CCCCCC", "#B9B93A"
)  # fmt: skip
TICKS = 5
MARKED = 20  # a line of at most so many points gets a dot on each
TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Series:
    """One line. A point whose y is not finite leaves a gap.

    ``step`` keeps each value until the next. ``weights`` (0 to 1, one a point) are the areas of
    the dots, as the share of all observations that stand behind a point.
    """

    name: str
    points: tuple[Point, ...]
    step: bool = False
    weights: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines over a common x axis.

    ``bands`` are shaded stretches of x, each with a word on it. The y axis starts at 0 unless
    ``from_zero`` is False. With ``diagonal`` both axes go from 0 to 1 and y = x is drawn, as a
    reliability diagram has it.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    bands: tuple[tuple[float, float, str], ...] = ()
    from_zero: bool = True
    diagonal: bool = False


@dataclass(frozen=True, slots=True)
class BarChart:
    """Groups of bars. ``values[g][s]`` is series s in group g, or None where there is none.

    ``spread[g][s]`` (low, high) is drawn as a whisker.
    """

    title: str
    y_label: str
    groups: tuple[str, ...]
    series: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    spread: tuple[tuple[Point | None, ...], ...] = ()


Chart = LineChart | BarChart


def page(
    charts: Sequence[Chart | None],
    note: str = "",
    *,
    columns: int = 1,
    width: int = 760,
    height: int = 320,
    legend: Legend = "right",
) -> str:
    """One SVG document: the charts in rows of ``columns`` panels, and a line of text below.

    A panel is ``width`` x ``height`` pixels; None leaves one empty. The legend stands on the
    right of each panel, below each, or once for the whole page (``shared``: the first chart's).
    """
    rows = -(-len(charts) // columns)
    shared = _names(next((c for c in charts if c), None)) if legend == "shared" else []
    lines = len(_legend_rows(shared, columns * width)) if shared else 0
    page_height = rows * height + LEGEND_LINE * lines + (24 if note else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{columns * width}" '
        f'height="{page_height}" viewBox="0 0 {columns * width} {page_height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        _STYLE,
        f'<rect class="page" width="{columns * width}" height="{page_height}"/>',
    ]
    for i, chart in enumerate(charts):
        if chart is not None:
            left, top = i % columns * width, i // columns * height
            body = _Panel(chart, width, height, legend).svg()
            parts.append(f'<g transform="translate({left} {top})">{body}</g>')
    parts.append(_legend_below(shared, columns * width, rows * height))
    if note:
        parts.append(_text(LEFT, page_height - 9, note, kind="quiet small"))
    return "\n".join([*filter(None, parts), "</svg>"]) + "\n"


# -- one panel ------------------------------------------------------------------------------

LEFT, TOP, BOTTOM = 70, 44, 46
LEGEND_WIDTH, LEGEND_LINE = 190, 18
MARGIN = 24  # right of the axes where no legend stands there


class _Panel:
    """Draws one chart into a rectangle whose upper left corner is (0, 0)."""

    def __init__(self, chart: Chart, width: int, height: int, legend: Legend) -> None:
        self.chart, self.width, self.height, self.legend = chart, width, height, legend
        self.right = width - (LEGEND_WIDTH if legend == "right" else MARGIN)
        below = _legend_rows(_names(chart), width) if legend == "below" else []
        self.base = height - BOTTOM - LEGEND_LINE * len(below)
        self.x0, self.x1, self.y0, self.y1 = _ranges(chart)

    def svg(self) -> str:
        chart = self.chart
        drawn = self._lines(chart) if isinstance(chart, LineChart) else self._bars(chart)
        parts = [_text(LEFT, 22, chart.title, kind="title"), *drawn]
        names = _names(chart)
        if self.legend == "right":
            parts += [
                _key(self.right + 14, TOP + 4 + LEGEND_LINE * i, i, name)
                for i, name in enumerate(names)
            ]
        elif self.legend == "below":
            parts.append(_legend_below(names, self.width, self.base + BOTTOM - 4))
        return "".join(parts)

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (self.right - LEFT)

    def y(self, value: float) -> float:
        return self.base - (value - self.y0) / (self.y1 - self.y0) * (self.base - TOP)

    def _frame(self) -> list[str]:
        parts = [_text(LEFT, 38, self.chart.y_label, kind="quiet small")]
        for value in _ticks(self.y0, self.y1):
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{self.right}"/>')
            parts.append(_text(LEFT - 7, y + 4, f"{value:g}", anchor="end"))
        parts.append(f'<path class="axis" d="M{LEFT} {self.base}H{self.right}"/>')
        return parts

    def _lines(self, chart: LineChart) -> list[str]:
        parts = []
        for start, end, _ in chart.bands:
            a, b = self.x(start), self.x(end)
            parts.append(
                f'<rect class="band" x="{a:.1f}" y="{TOP}" width="{max(0.0, b - a):.1f}" '
                f'height="{self.base - TOP}"/>'
            )
        parts += self._frame()
        for start, end, word in chart.bands:
            middle = (self.x(start) + self.x(end)) / 2
            parts.append(_text(middle, TOP + 14, word, anchor="middle", kind="quiet"))
        for value in _ticks(self.x0, self.x1):
            parts.append(_text(self.x(value), self.base + 17, f"{value:g}", anchor="middle"))
        middle = (LEFT + self.right) / 2
        parts.append(_text(middle, self.base + 35, chart.x_label, anchor="middle", kind="quiet"))
        if chart.diagonal:
            corners = f"M{self.x(0):.1f} {self.y(0):.1f}L{self.x(1):.1f} {self.y(1):.1f}"
            parts.append(f'<path class="grid" d="{corners}"/>')
        for i, series in enumerate(chart.series):
            kind = f"s{i % len(COLOURS)}"
            parts.append(f'<path class="line {kind}" d="{self._path(series)}"/>')
            parts += self._dots(series, kind)
        return parts

    def _path(self, series: Series) -> str:
        parts: list[str] = []
        gap = True
        for x, y in series.points:
            if math.isfinite(y):
                px, py = f"{self.x(x):.1f}", f"{self.y(y):.1f}"
                parts.append(
                    f"M{px} {py}" if gap else f"H{px}V{py}" if series.step else f"L{px} {py}"
                )
            gap = not math.isfinite(y)
        return "".join(parts)

    def _dots(self, series: Series, kind: str) -> list[str]:
        if series.step or (not series.weights and len(series.points) > MARKED):
            return []
        radii = [1.5 + 6.0 * math.sqrt(w) for w in series.weights] or [3.0] * len(series.points)
        return [
            f'<circle class="bar {kind}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="{r:.1f}"/>'
            for (x, y), r in zip(series.points, radii, strict=True)
            if math.isfinite(y)
        ]

    def _bars(self, chart: BarChart) -> list[str]:
        parts = self._frame()
        group_width = self.x(1) - self.x(0)
        bar_width = 0.84 * group_width / max(1, len(chart.series))
        for g, group in enumerate(chart.groups):
            parts.append(_text(self.x(g + 0.5), self.base + 17, group, anchor="middle"))
            for s, value in enumerate(chart.values[g]):
                if value is None:
                    continue
                x, y = self.x(g) + 0.08 * group_width + s * bar_width, self.y(value)
                parts.append(
                    f'<rect class="bar s{s % len(COLOURS)}" x="{x:.1f}" y="{y:.1f}" '
                    f'width="{max(1.0, bar_width - 2):.1f}" '
                    f'height="{max(0.0, self.y(0.0) - y):.1f}"/>'
                )
                pair = chart.spread[g][s] if chart.spread else None
                if pair is not None:
                    ends = f"{self.y(pair[0]):.1f}V{self.y(pair[1]):.1f}"
                    parts.append(f'<path class="axis" d="M{x + (bar_width - 2) / 2:.1f} {ends}"/>')
        return parts


def _ranges(chart: Chart) -> tuple[float, float, float, float]:
    """The ends of both axes: x0, x1, y0, y1, with x0 < x1 and y0 < y1."""
    if isinstance(chart, BarChart):
        heights = [v for row in chart.values for v in row if v is not None]
        heights += [pair[1] for row in chart.spread for pair in row if pair is not None]
        return 0.0, float(max(1, len(chart.groups))), *_widened(0.0, max(heights, default=0.0))
    if chart.diagonal:
        return 0.0, 1.0, 0.0, 1.0
    points = [p for s in chart.series for p in s.points if all(map(math.isfinite, p))]
    xs, ys = [x for x, _ in points] or [0.0], [y for _, y in points] or [0.0]
    x1 = max(xs) if max(xs) - min(xs) > TINY else min(xs) + 1.0
    low = min(0.0, *ys) if chart.from_zero else min(ys)
    return min(xs), x1, *_widened(low, max(ys))


def _widened(low: float, high: float) -> tuple[float, float]:
    """A little room above the largest value; a range of 1 where all values are alike."""
    return (low, low + 1.06 * (high - low)) if high - low > TINY else (low, low + 1.0)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers in [low, high]."""
    raw = (high - low) / TICKS
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(m * scale for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * scale >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


# -- legends and text -----------------------------------------------------------------------


def _names(chart: Chart | None) -> list[str]:
    if chart is None:
        return []
    return [s if isinstance(s, str) else s.name for s in chart.series]


def _legend_rows(names: Sequence[str], width: int) -> list[range]:
    """The numbers of the names in each line of a legend ``width`` pixels wide."""
    each = max(1, int((width - LEFT) // _key_width(names)))
    return [range(i, min(i + each, len(names))) for i in range(0, len(names), each)]


def _legend_below(names: Sequence[str], width: int, top: float) -> str:
    parts = []
    for line, numbers in enumerate(_legend_rows(names, width)):
        parts += [
            _key(LEFT + k * _key_width(names), top + LEGEND_LINE * line, i, names[i])
            for k, i in enumerate(numbers)
        ]
    return "".join(parts)


def _key_width(names: Sequence[str]) -> float:
    return 34 + 6.5 * max(map(len, names), default=0)  # a letter takes about 6.5 pixels


def _key(x: float, y: float, i: int, name: str) -> str:
    square = f'<rect class="bar s{i % len(COLOURS)}" x="{x:.1f}" y="{y:.1f}" '
    return f'{square}width="11" height="11"/>{_text(x + 17, y + 10, name)}'


def _text(x: float, y: float, text: str, *, anchor: str = "", kind: str = "") -> str:
    words = f' class="{kind}"' if kind else ""
    words += f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{words}>{escape(text)}</text>'


def _scheme(page: str, ink: str, quiet: str, grid: str, band: str, colours: Sequence[str]) -> str:
    series = "".join(
        f".bar.s{i}{{fill:{c}}}.line.s{i}{{stroke:{c}}}" for i, c in enumerate(colours)
    )
    return (
        f".page{{fill:{page}}}text{{fill:{ink}}}.quiet{{fill:{quiet}}}.grid{{stroke:{grid}}}"
        f".axis{{stroke:{ink}}}.band{{fill:{band}}}{series}"
    )


_LIGHT = _scheme("#ffffff", "#222222", "#555555", "#dddddd", "#f0e4c8", COLOURS)
_DARK = _scheme("#16181c", "#e6e6e6", "#a8adb5", "#3a3f47", "#3d3420", DARK_COLOURS)
_STYLE = (
    f"<style>.title{{font-size:14px;font-weight:bold}}.small{{font-size:11px}}"
    f".line{{fill:none;stroke-width:2}}.axis,.grid{{fill:none}}{_LIGHT}"
    f"@media (prefers-color-scheme:dark){{{_DARK}}}</style>"
)
