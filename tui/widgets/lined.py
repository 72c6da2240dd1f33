"""A widget that keeps its lines as they are painted.

Textual puts ground, padding and filters on every line of a widget that was
resized, and looks through all of them at every paint near it. A reply grows by
a line at a time: here a line is finished once, until its text or ground changes.
"""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget


class Lined(Widget):
    """``line(y)`` gives a line of the content: the same object as long as it is to look the same.

    Left and right padding is all the box that such a widget may have.
    """

    def __init__(self, *, id: str | None = None, classes: str = "") -> None:
        super().__init__(id=id, classes=classes)
        self._finished: dict[int, tuple[Strip, Strip]] = {}
        self._look: tuple[object, ...] = ()

    def line(self, y: int) -> Strip:
        raise NotImplementedError

    def render_line(self, y: int) -> Strip:
        return self.line(y)

    def render_lines(self, crop: Region) -> list[Strip]:
        _, ground = self.background_colors
        filters = self.get_line_filters()
        look = (ground, self.size.width, *filters)
        if look != self._look:
            self._look, self._finished = look, {}
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


def ground(widget: Widget, crop: Region) -> list[Strip]:
    """The lines of a container without a border: only the ground below its children."""
    _, colour = widget.background_colors
    strip = Strip.blank(crop.width, Style(bgcolor=colour.rich_color))
    for line_filter in widget.get_line_filters():
        strip = strip.apply_filter(line_filter, colour)
    return [strip] * crop.height
