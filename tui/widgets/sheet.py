"""A long text as one widget: parts that are laid out once for a width, and painted by the line.

What a message shows grows with every round. As a tree of widgets each change
would cost a layout of all of them; a sheet lays out its last part and paints
the lines that changed, however long the text before them is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from rich.cells import cell_len
from rich.style import Style
from textual.geometry import Region, Size
from textual.selection import Selection
from textual.strip import Strip

from .inks import Inks, inks
from .lined import Lined

Part = TypeVar("Part")
_NOTHING = Strip([])


class Sheet(Lined, Generic[Part]):
    """``put`` replaces the parts from a position on; ``lay`` makes the lines of one."""

    DEFAULT_CSS = "Sheet { height: auto; padding: 0 2; }"

    def __init__(self, *, classes: str = "") -> None:
        super().__init__(classes=classes)
        self.parts: list[Part] = []
        self._lines: list[Strip] = []
        self._starts: list[int] = []  # first line of each part
        self._width = 0  # that the lines are laid out for; 0: not at all
        self._theme = ""
        self._ink = Style()
        self._inks: Inks | None = None
        self._selection: Selection | None = None

    def lay(self, part: Part, width: int) -> list[Strip]:
        """The lines of a part, each ``width`` cells wide."""
        raise NotImplementedError

    def joins(self, part: Part) -> bool:
        """Whether a part's lines were one line before they were wrapped, for a copied selection."""
        return False

    @property
    def inks(self) -> Inks:
        """What Rich's renderables are laid out with: the theme's colours."""
        if self._inks is None:
            self._inks = inks(self.app.theme_variables)
        return self._inks

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
        # Lines that look as before are the same objects, so that they are not finished again.
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
            self._lines += self.lay(part, self._width)

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
            self._theme, self._width, self._inks = self.app.theme, 0, None
            self.refresh(layout=True)
        self._ink = Style(color=self.rich_style.color) if self.is_attached else Style()

    def prepare(self, size: Size) -> None:
        if size.width and size.width != self._width:
            # Textual took the place of the lines from its memory of an earlier layout.
            self._lay_anew(size.width)
            if len(self._lines) != size.height:
                self.refresh(layout=True)
        # On its way out it may be painted once more, without a screen.
        self._selection = self.text_selection if self.is_attached else None

    def line(self, y: int) -> Strip:
        if y >= len(self._lines):
            return _NOTHING
        strip, selection = self._lines[y].apply_style(self._ink), self._selection
        if selection is not None and (span := selection.get_span(y)) is not None:
            strip = self._selected(strip, *span)
        return strip.apply_offsets(0, y)

    # Selecting with the mouse

    def _selected(self, strip: Strip, start: int, end: int) -> Strip:
        """The strip with its characters from ``start`` to ``end`` (-1: its end) marked."""
        text = strip.text
        left = cell_len(text[:start])
        right = strip.cell_length if end == -1 else cell_len(text[:end])
        # The ground only: its colour for text is that of the ground, to be blended by Textual.
        mark = Style(bgcolor=self.screen.get_component_rich_style("screen--selection").bgcolor)
        before, within, after = strip.divide([left, right, strip.cell_length])
        # Over the text's own styles, hence not apply_style, which goes below them.
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
