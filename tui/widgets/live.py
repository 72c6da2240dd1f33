"""The live panel beside the chat: the charts that matter most, for one look."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll

from ..charts import Draw, gauges, scheduling, timelines
from ..state import LiveState
from .chart import Chart


class LivePanel(VerticalScroll, can_focus=False):
    """Charts of ``live``; ``redraw`` after new events."""

    def __init__(self, live: LiveState) -> None:
        super().__init__()
        self._live = live
        self._charts: list[Chart] = []

    def _chart(self, draw: Draw, height: int) -> Chart:
        chart = Chart(lambda w, h: draw(self._live, w, h))
        chart.styles.height = height
        self._charts.append(chart)
        return chart

    def compose(self) -> ComposeResult:
        yield self._chart(timelines.speed, 6)
        yield self._chart(timelines.cuts_over_time, 5)
        with Horizontal(classes="pair"):
            yield self._chart(scheduling.cut_histogram, 6)
            yield self._chart(scheduling.by_position, 6)
        yield self._chart(timelines.step_time, 5)
        yield self._chart(gauges.shares, 2)
        yield self._chart(gauges.memory, 2)
        yield self._chart(gauges.context, 2)
        yield self._chart(timelines.slowdown, 5)
        yield self._chart(timelines.acceptance, 5)

    def redraw(self) -> None:
        for chart in self._charts:
            chart.redraw()
