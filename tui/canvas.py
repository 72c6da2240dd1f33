"""A small drawing surface of terminal cells: text, braille lines, block bars.

Styles are names ("draft", "axis"), which the widget that shows the canvas turns into colours.
Coordinates are cells; ``dot`` and ``segment`` take dots, of which a cell has 2 x 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len

_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # [x][y] of a braille cell
_UP = " ▁▂▃▄▅▆▇█"
_RIGHT = " ▏▎▍▌▋▊▉█"

Run = tuple[str, str]  # text, style name


class Canvas:
    """``width`` x ``height`` cells; anything drawn outside is dropped."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = max(0, width), max(0, height)
        self._chars = [[" "] * self.width for _ in range(self.height)]
        self._styles = [[""] * self.width for _ in range(self.height)]

    def text(self, x: int, y: int, text: str, style: str = "") -> int:
        """Write ``text`` from cell (x, y); returns the x after it. Wide characters take two."""
        if not 0 <= y < self.height:
            return x
        for char in text:
            wide = cell_len(char)
            if wide == 0:  # joins the character before it
                if 0 < x <= self.width and self._chars[y][x - 1]:
                    self._chars[y][x - 1] += char
                continue
            if x >= 0 and x + wide <= self.width:
                self._chars[y][x], self._styles[y][x] = char, style
                if wide == 2:
                    self._chars[y][x + 1], self._styles[y][x + 1] = "", style
            x += wide
        return x

    def right(self, y: int, text: str, style: str = "", end: int | None = None) -> None:
        """Write ``text`` so that it ends at ``end`` (the right edge)."""
        self.text((self.width if end is None else end) - cell_len(text), y, text, style)

    def dot(self, px: int, py: int, style: str) -> None:
        """Set the dot (px, py); (0, 0) is the top left one of 2 x 4 dots a cell."""
        x, y = px // 2, py // 4
        if not (0 <= x < self.width and 0 <= y < self.height and px >= 0 and py >= 0):
            return
        char = self._chars[y][x]
        old = ord(char) - 0x2800 if len(char) == 1 and 0x2800 <= ord(char) < 0x2900 else 0
        if old == 0 and char not in (" ", "\u2800"):
            return  # text stays on top of lines
        self._chars[y][x] = chr(0x2800 | old | _BITS[px % 2][py % 4])
        self._styles[y][x] = style

    def segment(self, ax: int, ay: int, bx: int, by: int, style: str) -> None:
        """A straight line between two dots."""
        steps = max(abs(bx - ax), abs(by - ay), 1)
        for i in range(steps + 1):
            self.dot(round(ax + (bx - ax) * i / steps), round(ay + (by - ay) * i / steps), style)

    def column(self, x: int, y: int, height: int, share: float, style: str, width: int = 1) -> None:
        """A bar of ``share`` (0..1) of ``height`` cells, standing on the row y + height - 1."""
        eighths = round(max(0.0, min(1.0, share)) * height * 8)
        if share > 0 and eighths == 0:
            eighths = 1
        for row in range(height):
            level = max(0, min(8, eighths - 8 * row))
            if level:
                self.text(x, y + height - 1 - row, _UP[level] * width, style)

    def bar(self, x: int, y: int, width: int, share: float, style: str) -> None:
        """A bar of ``share`` (0..1) of ``width`` cells, lying from x to the right."""
        eighths = round(max(0.0, min(1.0, share)) * width * 8)
        text = "█" * (eighths // 8) + (_RIGHT[eighths % 8] if eighths % 8 else "")
        self.text(x, y, text, style)

    def stacked(self, x: int, y: int, width: int, parts: Sequence[tuple[float, str, str]]) -> None:
        """``(share, character, style)`` side by side; rounding errors do not add up."""
        total, start = 0.0, 0
        for share, char, style in parts:
            total += share
            end = round(min(1.0, total) * width)
            self.text(x + start, y, char * (end - start), style)
            start = end

    def place(self, x: int, y: int, other: Canvas) -> None:
        """Draw ``other`` over this canvas, with its top left corner at (x, y)."""
        wide = min(other.width, self.width - x)
        for row in range(min(other.height, self.height - y)):
            self._chars[y + row][x : x + wide] = other._chars[row][:wide]
            self._styles[y + row][x : x + wide] = other._styles[row][:wide]

    def changed(self, before: Canvas) -> Sequence[int]:
        """The rows that differ from those of ``before``, a canvas of the same size."""
        return [
            y
            for y in range(self.height)
            if self._chars[y] != before._chars[y] or self._styles[y] != before._styles[y]
        ]

    def row(self, y: int) -> Iterator[Run]:
        """The row as runs of one style each; their cells add up to the width."""
        if not 0 <= y < self.height or not self.width:
            return
        chars, styles = self._chars[y], self._styles[y]
        start = 0
        for x in range(1, self.width + 1):
            if x == self.width or styles[x] != styles[start]:
                yield "".join(chars[start:x]), styles[start]
                start = x

    def plain(self) -> list[str]:
        """The rows without styles, for tests and for screen readers."""
        return ["".join(row).rstrip() for row in self._chars]


def nice_ceiling(value: float) -> float:
    """The next of 1, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten: an axis that rarely moves."""
    if value <= 0:
        return 1.0
    power = 1.0
    while value > 10 * power:
        power *= 10
    while value <= power:
        power /= 10
    for step in (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0):
        if value <= step * power * 1.0000001:
            return step * power
    return 10 * power
