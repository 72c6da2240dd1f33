"""A reply token by token, coloured by origin: drafted and accepted, or the target's own.

Accepted draft tokens have a background, the stronger the higher the drafter's confidence; the
target's own are underlined as well as coloured, so that both can be told apart without colour. The
text is cut into parts, so that only the last one is laid out again while it grows.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text
from textual.color import Color
from textual.strip import Strip

from ..conversation import Span
from ..display_text import Cleaner
from .virtual_text import VirtualText

PART = 160  # tokens; a part ends at the first line end after so many, or at thrice that


class TokenText(VirtualText[tuple[Span, ...]]):
    """Shows ``(text, origin, confidence)`` tokens; ``extend`` takes those that are new."""

    def __init__(self, spans: Sequence[Span]) -> None:
        super().__init__()
        self._cleaner = Cleaner()
        self._seen = 0
        self.extend(spans)

    def extend(self, spans: Sequence[Span]) -> None:
        """Add what is new in ``spans``, which are all of the reply's tokens."""
        if len(spans) == self._seen:
            return
        at = max(0, len(self.parts) - 1)
        parts = [list(part) for part in self.parts[at:]] or [[]]
        for text, origin, confidence in spans[self._seen :]:
            part, shown = parts[-1], self._cleaner.feed(text)
            if len(part) >= PART and shown.startswith("\n"):
                parts.append(part := [])
                shown = shown[1:]  # the new part starts a line anyway
            part.append((shown, origin, confidence))
            if (len(part) > PART and shown.endswith("\n")) or len(part) > 3 * PART:
                parts.append([])
        self._seen = len(spans)
        self.put(at, [tuple(part) for part in parts])

    def lay_out(self, part: tuple[Span, ...], width: int) -> list[Strip]:
        text = Text(overflow="fold")
        for piece, origin, confidence in part:
            text.append(piece, self._style(origin, confidence))
        if not text.plain:
            return []
        if part is not self.parts[-1] and text.plain.endswith("\n"):
            text.right_crop(1)  # the next part starts a line anyway
        return self.rich_theme.strips(text, width)

    def _style(self, origin: str, confidence: float | None) -> Style:
        variables = self.app.theme_variables
        if origin != "draft":
            return Style(color=variables["dspark-target"], underline=True)
        sure = 0.6 if confidence is None else max(0.0, min(1.0, confidence))
        below = self.background_colors[1]
        background = (
            below if below.ansi is None else Color(0, 0, 0)
        )  # the terminal's own, which is not known
        shade = background.blend(Color.parse(variables["dspark-draft"]), 0.12 + 0.40 * sure)
        return Style(bgcolor=shade.hex6)
