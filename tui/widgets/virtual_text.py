"""A long text as one widget: its parts are laid out once for a width and painted line by line.

A message grows with every round. As a tree of widgets each change would lay out all of it; here
only the last part is laid out again and only the lines that changed are painted, however long the
text before them is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from rich.cells import cell_len
from rich.style import Style
from textual.geometry import Region, Size
from textual.selection import Selection
from textual.strip import Strip

from .cached_lines import CachedLines
from .rich_theme import RichTheme, rich_theme

Part = TypeVar("Part")
_NOTHING = Strip([])


class VirtualText(CachedLines, Generic[Part]):
    """``put`` replaces the parts from a position on; ``lay_out`` makes the lines of one part."""

    DEFAULT_CSS = "VirtualText { height: auto; padding: 0 2; }"

    def __init__(self, *, classes: str = "") -> None:
        super().__init__(classes=classes)
        self.parts: list[Part] = []
        self._lines: list[Strip] = []
        self._starts: list[int] = []  # first line of each part
        self._width = 0  # for which the lines are laid out; 0: not yet
        self._theme = ""
        self._text_style = Style()
        self._rich_theme: RichTheme | None = None
        self._selection: Selection | None = None

    def lay_out(self, part: Part, width: int) -> list[Strip]:
        """The lines of a part, each ``width`` cells wide."""
        raise NotImplementedError

    def joins(self, part: Part) -> bool:
        """Whether a part was one line before it was wrapped; a copied selection joins it again."""
        return False

    @property
    def rich_theme(self) -> RichTheme:
        """The theme's colours, with which Rich lays out the text."""
        if self._rich_theme is None:
            self._rich_theme = rich_theme(self.app.theme_variables)
        return self._rich_theme

    def put(self, at: int, parts: Sequence[Part]) -> None:
        """Show ``parts`` in place of those from position ``at`` on."""
        self.parts[at:] = parts
        if not self._width:
            self.refresh(layout=True)
            return
        before = len(self._lines)
        first = self._starts[at] if at < len(self._starts) else before
        old = self._lines[first:]
        del self._lines[first:], self._starts[at:]
        self._lay_from(at)
        # Lines that look as before stay the same objects, so that they are not finished again.
        same = 0
        for was, now in zip(old, self._lines[first:], strict=False):
            if was != now:
                break
            self._lines[first + same] = was
            same += 1
        if len(self._lines) != before:
            self.refresh(layout=True)
        elif same < len(old):
            self.refresh(Region(0, first + same, self._width, len(old) - same))

    def _lay_from(self, at: int) -> None:
        for part in self.parts[at:]:
            self._starts.append(len(self._lines))
            self._lines += self.lay_out(part, self._width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        if width and width != self._width:
            self._lay_anew(width)
        return len(self._lines)

    def _lay_anew(self, width: int) -> None:
        self._width = width
        self._lines, self._starts = [], []
        self._lay_from(0)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        if self.is_attached and self._theme != self.app.theme:
            self._theme, self._width, self._rich_theme = self.app.theme, 0, None
            self.refresh(layout=True)
        self._text_style = Style(color=self.rich_style.color) if self.is_attached else Style()

    def prepare(self, size: Size) -> None:
        if size.width and size.width != self._width:
            # Textual used the height that it remembered from an earlier layout.
            self._lay_anew(size.width)
            if len(self._lines) != size.height:
                self.refresh(layout=True)
        # While it is being removed it may be painted once more, without a screen.
        self._selection = self.text_selection if self.is_attached else None

    def line(self, y: int) -> Strip:
        if y >= len(self._lines):
            return _NOTHING
        strip, selection = self._lines[y].apply_style(self._text_style), self._selection
        if selection is not None and (span := selection.get_span(y)) is not None:
            strip = self._selected(strip, *span)
        return strip.apply_offsets(0, y)

    # Selecting with the mouse

    def _selected(self, strip: Strip, start: int, end: int) -> Strip:
        """The strip with its characters from ``start`` to ``end`` (-1: its end) marked."""
        text = strip.text
        left = cell_len(text[:start])
        right = strip.cell_length if end == -1 else cell_len(text[:end])
        # Only the background: Textual would blend the text's colour with it.
        mark = Style(bgcolor=self.screen.get_component_rich_style("screen--selection").bgcolor)
        before, within, after = strip.divide([left, right, strip.cell_length])
        # Above the text's own styles; apply_style would go below them.
        marked = Strip(
            [segment._replace(style=(segment.style or Style()) + mark) for segment in within]
        )
        return Strip.join([before, marked, after])

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        starts = [*self._starts, len(self._lines)]
        text = ""
        for part, first, end in zip(self.parts, starts, starts[1:], strict=False):
            for y in range(first, end):
                if (span := selection.get_span(y)) is None:
                    continue
                line = self._lines[y].text[span[0] : None if span[1] == -1 else span[1]].rstrip()
                wrapped = y > first and self.joins(part)
                text += (" " if wrapped else "\n") + line
        return text[1:], "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()
