"""Everything the engine tells, on one screen: requests, time lines, cost, confidence, decision."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Grid, Vertical, VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer

from ..charts import Draw, gauges, scheduling, timelines
from ..pace import CHART_SECONDS, Pace
from ..state import LiveState
from ..widgets.chart import Chart

_GRID = (
    timelines.speed,
    scheduling.decision,
    scheduling.cost_curve,
    scheduling.reliability,
    timelines.cuts_over_time,
    scheduling.cut_histogram,
    scheduling.by_position,
    timelines.acceptance,
    timelines.accepted_length,
    timelines.step_time,
    timelines.slowdown,
)
_STACKED = (gauges.shares, gauges.memory, gauges.context)


class MonitorScreen(Screen[None]):
    BINDINGS: ClassVar = [
        Binding("escape,q,ctrl+g", "app.pop_screen", "Back to the chat", id="monitor.back"),
        Binding("f1", "app.help", "Help"),
    ]
    HORIZONTAL_BREAKPOINTS = [(0, "-two"), (110, "-three"), (170, "-four")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-low"), (36, "-middle"), (52, "-high")]  # noqa: RUF012

    def __init__(self, live: LiveState) -> None:
        super().__init__()
        self._live = live
        self._pace = Pace(CHART_SECONDS, self.redraw)

    def _chart(self, draw: Draw, classes: str = "") -> Chart:
        return Chart(lambda w, h: draw(self._live, w, h), classes=classes)

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=True):
            yield self._chart(gauges.requests_table, "requests")
            with Grid():
                for draw in _GRID:
                    yield self._chart(draw)
                with Vertical():
                    for draw in _STACKED:
                        yield self._chart(draw)
        yield self._chart(gauges.status_line, "status")
        yield Footer(compact=True)

    def beat(self, news: bool) -> None:
        self._pace.beat(news)

    def redraw(self) -> None:
        for chart in self.query(Chart):
            chart.redraw()
