"""The live panel beside the chat: the charts that matter most."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll

from dspark_mlx.stats import EngineStats

from ..canvas import Canvas
from ..charts import Draw, gauges, scheduling, timelines
from .chart import Chart

# Rows of the panel: what stands in each, side by side, and how high it is.
_ROWS: tuple[tuple[tuple[Draw, ...], int], ...] = (
    ((timelines.speed,), 6),
    ((timelines.cuts_over_time,), 5),
    ((scheduling.cut_histogram, scheduling.by_position), 6),
    ((timelines.step_time,), 5),
    ((gauges.shares,), 2),
    ((gauges.memory,), 2),
    ((gauges.context,), 2),
    ((timelines.slowdown,), 5),
    ((timelines.acceptance,), 5),
)
HEIGHT = sum(height + 1 for _, height in _ROWS)


class LivePanel(VerticalScroll, can_focus=False):
    """Charts of ``stats``; to be redrawn after new events."""

    def __init__(self, stats: EngineStats) -> None:
        super().__init__()
        self._stats = stats
        # One widget: to paint ten would cost more than to draw their charts.
        self._charts = Chart(self._draw)
        self._charts.styles.height = HEIGHT

    def compose(self) -> ComposeResult:
        yield self._charts

    def _draw(self, width: int, height: int) -> Canvas:
        canvas, y = Canvas(width, height), 0
        for draws, high in _ROWS:
            wide = (width - len(draws) + 1) // len(draws)
            for n, draw in enumerate(draws):
                canvas.place(n * (wide + 1), y, draw(self._stats, wide, high))
            y += high + 1
        return canvas

    def redraw(self) -> None:
        self._charts.redraw()
