"""A widget that keeps its lines as they are painted.

Textual puts ground, padding and filters on every line of a widget that was
resized, and looks through all of them at every paint near it. A reply grows by
a line at a time: here a line is finished once, until its text or ground changes.
"""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.geometry import Region, Size
from textual.reactive import Reactive
from textual.strip import Strip
from textual.widget import Widget


class Grounded(Widget):
    """Shows the ground below its children, a container without border; or paints upon it.

    To be the last of several bases: Textual takes the styles of the first one only.
    """

    _ground: Color | None = None

    @property
    def ground(self) -> Color:
        """Its colour, which Textual works out anew from all that it lies in; here once a style."""
        if self._ground is None:
            _, self._ground = self.background_colors
        return self._ground

    def notify_style_update(self) -> None:
        self._ground = None
        super().notify_style_update()

    def render_lines(self, crop: Region) -> list[Strip]:
        strip = Strip.blank(crop.width, Style(bgcolor=self.ground.rich_color))
        for line_filter in self.get_line_filters():
            strip = strip.apply_filter(line_filter, self.ground)
        return [strip] * crop.height


class Lined(Grounded):
    """``line(y)`` gives a line of the content: the same object as long as it is to look the same.

    Left and right padding is all the box that such a widget may have.
    """

    # Its children are none: a change of its size needs no other layout than the one that made it.
    virtual_size = Reactive(Size(0, 0))

    def __init__(self, *, id: str | None = None, classes: str = "") -> None:
        super().__init__(id=id, classes=classes)
        self._finished: dict[int, tuple[Strip, Strip]] = {}
        self._look: tuple[object, ...] = ()

    def line(self, y: int) -> Strip:
        raise NotImplementedError

    def prepare(self, size: Size) -> None:
        """Comes before the ``line`` calls of each paint, with the size of the content."""

    def render_line(self, y: int) -> Strip:
        self.prepare(self.size)
        return self.line(y)

    def render_lines(self, crop: Region) -> list[Strip]:
        ground, size, filters = self.ground, self.size, self.get_line_filters()
        look = (ground, size.width, *filters)
        if look != self._look:
            self._look, self._finished = look, {}
        self.prepare(size)
        found = []
        for y in crop.line_range:
            strip = self.line(y)
            known = self._finished.get(y)
            if known is None or known[0] is not strip:
                known = self._finished[y] = strip, self._finish(strip, ground)
            found.append(known[1])
        if crop.column_span != (0, self.outer_size.width):
            found = [strip.crop(*crop.column_span) for strip in found]
        return found

    def _finish(self, strip: Strip, ground: Color) -> Strip:
        below = Style(bgcolor=ground.rich_color)
        _, right, _, left = self.styles.padding
        inner = strip.adjust_cell_length(self.size.width).apply_style(below)
        done = Strip.join(
            [
                Strip([Segment(" " * left, below)], left),
                inner,
                Strip([Segment(" " * right, below)], right),
            ]
        )
        for line_filter in self.get_line_filters():
            done = done.apply_filter(line_filter, ground)
        return done
