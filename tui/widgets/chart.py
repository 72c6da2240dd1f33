"""The widget that shows a canvas, and how often it is redrawn."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from rich.segment import Segment
from rich.style import Style
from textual.errors import NoWidget
from textual.geometry import Region, Size
from textual.strip import Strip

from ..canvas import Canvas
from .cached_lines import CachedLines
from .rich_theme import RichTheme, rich_theme

STRIP_SECONDS = 0.4  # between two paints of the draft strip: time to read a word
CHART_SECONDS = 1.0
_NOTHING = Strip([])


@runtime_checkable
class Painted(Protocol):
    """A screen with charts; ``tick`` is called at every look at the engine's events."""

    def tick(self, news: bool) -> None: ...


class Throttle:
    """Calls ``paint`` at most every ``seconds`` while there is news, the last news included."""

    def __init__(self, seconds: float, paint: Callable[[], None]) -> None:
        self._seconds, self._paint = seconds, paint
        self._stale = False
        self._last = -seconds

    def tick(self, news: bool) -> None:
        self._stale = self._stale or news
        if self._stale and (now := time.monotonic()) - self._last >= self._seconds:
            self._stale, self._last = False, now
            self._paint()


class Chart(CachedLines):
    """Shows the canvas that ``draw(width, height)`` makes; ``redraw()`` makes it again."""

    ALLOW_SELECT = False

    def __init__(
        self, draw: Callable[[int, int], Canvas], *, id: str | None = None, classes: str = ""
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._draw = draw
        self._canvas: Canvas | None = None
        self._strips: dict[int, Strip] = {}
        self._colours: RichTheme | None = None
        self._base = Style()

    def redraw(self) -> None:
        """Draw again and paint the rows that changed, if the chart can be seen."""
        if not self.is_mounted or not self.size or not self._seen:
            self._canvas = None
            return
        width, height = self.size
        before, canvas = self._canvas, self._draw(width, height)
        self._canvas = canvas
        if before is None or (before.width, before.height) != (canvas.width, canvas.height):
            self._strips.clear()
            self.refresh()
            return
        for y in (rows := canvas.changed(before)):
            self._strips.pop(y, None)
        if rows:
            # One region: the screen is painted by the rectangle around all of them anyway.
            self.refresh(Region(0, rows[0], width, rows[-1] - rows[0] + 1))

    @property
    def _seen(self) -> bool:
        """Whether any of it is on the screen; to refresh what was scrolled away is expensive."""
        try:
            return bool(self.screen.find_widget(self).visible_region)
        except NoWidget:
            return False

    def notify_style_update(self) -> None:
        self._colours = None
        self._strips.clear()
        super().notify_style_update()

    def prepare(self, size: Size) -> None:
        canvas = self._canvas
        if canvas is None or (canvas.width, canvas.height) != size:
            self._canvas = self._draw(*size)
            self._strips.clear()

    def line(self, y: int) -> Strip:
        canvas = self._canvas
        if canvas is None or y >= canvas.height:
            return _NOTHING
        if y not in self._strips:
            self._strips[y] = self._paint(canvas, y)
        return self._strips[y]

    def _paint(self, canvas: Canvas, y: int) -> Strip:
        if self._colours is None:
            self._colours, self._base = rich_theme(self.app.theme_variables), self.rich_style
        style_of = self._colours.chart_style
        segments = [Segment(text, self._base + style_of(name)) for text, name in canvas.row(y)]
        return Strip(segments, canvas.width)

    @property
    def plain(self) -> str:
        """What is drawn, as text."""
        canvas = self._canvas or self._draw(self.size.width, self.size.height)
        return "\n".join(canvas.plain())
