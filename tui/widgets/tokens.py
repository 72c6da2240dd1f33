"""A reply token by token, coloured by origin: drafted and accepted, or the target's own.

Accepted draft tokens have a ground whose strength is the drafter's confidence;
the target's own are underlined as well as coloured, so that both can be told
apart without colour. Text is cut into parts so that only the last one is laid
out again while it grows.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual.color import Color
from textual.containers import Vertical
from textual.content import Content, Span
from textual.style import Style
from textual.widgets import Static

from ..conversation import Span as TokenSpan
from ..text import Cleaner

PART = 160  # tokens; a part ends at the first line end after so many, or at thrice that


class TokenText(Vertical):
    """Shows ``(text, origin, confidence)`` tokens; ``extend`` takes those that are new."""

    DEFAULT_CSS = """
    TokenText { height: auto; padding: 0 2; }
    TokenText > Static { height: auto; width: 1fr; }
    """

    def __init__(self, spans: Sequence[TokenSpan]) -> None:
        super().__init__()
        self._cleaner = Cleaner()
        self._parts: list[list[TokenSpan]] = [[]]
        self._changed: set[int] = set()
        self._add(spans)
        self._seen = len(spans)

    def on_mount(self) -> None:
        self._show()

    def notify_style_update(self) -> None:
        self._changed = set(range(len(self._parts)))
        if self.is_mounted:
            self._show()
        super().notify_style_update()

    def extend(self, spans: Sequence[TokenSpan]) -> None:
        """``spans`` are all of the reply's tokens; the new ones are added."""
        if len(spans) > self._seen:
            self._add(spans[self._seen :])
            self._seen = len(spans)
            if self.is_mounted:
                self._show()

    def _add(self, spans: Sequence[TokenSpan]) -> None:
        for text, origin, confidence in spans:
            part, shown = self._parts[-1], self._cleaner.feed(text)
            if len(part) >= PART and shown.startswith("\n"):
                self._parts.append(part := [])
                shown = shown[1:]  # the new part starts a line anyway
            part.append((shown, origin, confidence))
            self._changed.add(len(self._parts) - 1)
            if (len(part) > PART and shown.endswith("\n")) or len(part) > 3 * PART:
                self._parts.append([])

    def _show(self) -> None:
        shown = list(self.query(Static))
        for index in sorted(self._changed):
            content = self._content(index)
            if index < len(shown):
                shown[index].update(content)
            else:
                self.mount(Static(content, markup=False))
        self._changed.clear()

    def _content(self, index: int) -> Content:
        part = self._parts[index]
        text = "".join(text for text, _, _ in part)
        if index + 1 < len(self._parts) and text.endswith("\n"):
            text = text[:-1]  # the part's own end starts the next line
        spans, start = [], 0
        for piece, origin, confidence in part:
            end = min(start + len(piece), len(text))
            if end > start:
                spans.append(Span(start, end, self._style(origin, confidence)))
            start = end
        return Content(text, spans)

    def _style(self, origin: str, confidence: float | None) -> Style:
        variables = self.app.theme_variables
        if origin != "draft":
            return Style(foreground=Color.parse(variables["dspark-target"]), underline=True)
        ground = Color.parse(variables["dspark-draft"])
        strength = 0.12 + 0.40 * (0.6 if confidence is None else max(0.0, min(1.0, confidence)))
        return Style(background=ground.with_alpha(strength))
