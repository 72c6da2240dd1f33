"""Everything that the engine reports, on one screen: requests, time lines, cost, decision."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Grid, Vertical, VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer

from dspark_mlx.stats import EngineStats

from ..charts import Draw, gauges, scheduling, timelines
from ..widgets.chart import CHART_SECONDS, Chart, Throttle

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

    def __init__(self, stats: EngineStats) -> None:
        super().__init__()
        self._stats = stats
        self._throttle = Throttle(CHART_SECONDS, self.redraw)

    def _chart(self, draw: Draw, classes: str = "") -> Chart:
        return Chart(lambda w, h: draw(self._stats, w, h), classes=classes)

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=True):
            yield self._chart(gauges.requests_table, "requests")
            with Grid():
                yield from map(self._chart, _GRID)
                with Vertical():
                    yield from map(self._chart, _STACKED)
        yield self._chart(gauges.status_line, "status")
        yield Footer(compact=True)

    def tick(self, news: bool) -> None:
        self._throttle.tick(news)

    def redraw(self) -> None:
        for chart in self.query(Chart):
            chart.redraw()
