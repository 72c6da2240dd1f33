"""Widgets that are painted line by line, with what was painted kept.

Textual puts background, padding and filters on every line of a widget that was resized, and looks
through all of them at every paint near it. A reply grows by one line at a time: here a line is
finished once, until its text or its background changes.
"""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.geometry import Region, Size
from textual.reactive import Reactive
from textual.strip import Strip
from textual.widget import Widget


class Background(Widget):
    """A borderless container that paints only its background, whose colour it keeps.

    It must be the last of several bases, as Textual takes the styles of the first.
    """

    _background_colour: Color | None = None

    @property
    def background_colour(self) -> Color:
        """The background's colour. Textual works it out from all ancestors at every use."""
        if self._background_colour is None:
            _, self._background_colour = self.background_colors
        return self._background_colour

    def notify_style_update(self) -> None:
        self._background_colour = None
        super().notify_style_update()

    def render_lines(self, crop: Region) -> list[Strip]:
        strip = Strip.blank(crop.width, Style(bgcolor=self.background_colour.rich_color))
        for line_filter in self.get_line_filters():
            strip = strip.apply_filter(line_filter, self.background_colour)
        return [strip] * crop.height


class CachedLines(Background):
    """``line(y)`` returns a line of the content, and the same object while it looks the same.

    The widget's box may have padding at the left and right only.
    """

    # There are no children, so a change of the size needs no further layout.
    virtual_size = Reactive(Size(0, 0))

    def __init__(self, *, id: str | None = None, classes: str = "") -> None:
        super().__init__(id=id, classes=classes)
        self._finished: dict[int, tuple[Strip, Strip]] = {}
        self._look: tuple[object, ...] = ()

    def line(self, y: int) -> Strip:
        raise NotImplementedError

    def prepare(self, size: Size) -> None:
        """Called before the ``line`` calls of each paint, with the size of the content."""

    def render_line(self, y: int) -> Strip:
        self.prepare(self.size)
        return self.line(y)

    def render_lines(self, crop: Region) -> list[Strip]:
        colour, size, filters = self.background_colour, self.size, self.get_line_filters()
        look = (colour, size.width, *filters)
        if look != self._look:
            self._look, self._finished = look, {}
        self.prepare(size)
        found = []
        for y in crop.line_range:
            strip = self.line(y)
            known = self._finished.get(y)
            if known is None or known[0] is not strip:
                known = self._finished[y] = strip, self._finish(strip, colour)
            found.append(known[1])
        if crop.column_span != (0, self.outer_size.width):
            found = [strip.crop(*crop.column_span) for strip in found]
        return found

    def _finish(self, strip: Strip, colour: Color) -> Strip:
        below = Style(bgcolor=colour.rich_color)
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
            done = done.apply_filter(line_filter, colour)
        return done
