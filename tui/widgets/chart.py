"""The widget that shows a canvas: any chart function, redrawn when told and only when seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.strip import Strip
from textual.widget import Widget

from ..canvas import Canvas


class Palette:
    """Style names of the canvases as Rich styles, for the theme in use."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._styles: dict[str, Style] = {}
        self._colours = {
            name.removeprefix("dspark-"): value
            for name, value in variables.items()
            if name.startswith("dspark-")
        }
        self._variables = variables

    def __getitem__(self, name: str) -> Style:
        style = self._styles.get(name)
        if style is None:
            style = self._styles[name] = self._make(name)
        return style

    def _make(self, name: str) -> Style:
        name, _, extra = name.partition("-")
        muted = self._variables.get("foreground-muted", "")
        text = self._variables.get("foreground", "")
        fixed: dict[str, dict[str, Any]] = {
            "title": {"color": text, "bold": True},
            "value": {"color": text},
            "text": {"color": text},
            "label": {"color": text},
            "axis": {"color": muted},
            "dim": {"color": muted},
            "plain": {"color": muted},
            "active": {"color": text, "bold": True, "reverse": True},
        }
        options: dict[str, Any] = fixed.get(name, {"color": self._colours.get(name, text)}).copy()
        colour = options.get("color", "")
        if not isinstance(colour, str) or not colour.startswith("#"):
            options.pop("color", None)  # "auto" and ANSI themes: the terminal's own
            if colour == muted and muted:
                options["dim"] = True
        elif len(colour) > 7:  # with an alpha: blended here, as Rich knows no transparency
            ground = Color.parse(self._variables.get("background", "#000000"))
            options["color"] = ground.blend(
                Color.parse(colour[:7]), int(colour[7:9], 16) / 255
            ).hex6
        if extra == "strike":
            options["strike"] = True
        return Style(**options)


class Chart(Widget):
    """``draw(width, height)`` makes the canvas; ``redraw()`` has it made again."""

    ALLOW_SELECT = False

    def __init__(
        self, draw: Callable[[int, int], Canvas], *, id: str | None = None, classes: str = ""
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._draw = draw
        self._canvas: Canvas | None = None
        self._strips: list[Strip] = []
        self._palette: Palette | None = None

    def redraw(self) -> None:
        """Paint anew, unless nothing changed since the last time or nobody can see it."""
        if not self.is_mounted or not self.region or not self.size:
            self._canvas = None
            return
        canvas = self._draw(self.size.width, self.size.height)
        if self._canvas is not None and canvas == self._canvas:
            return
        self._canvas, self._strips = canvas, []
        self.refresh()

    def notify_style_update(self) -> None:
        self._palette = None
        self._strips = []
        super().notify_style_update()

    def render_line(self, y: int) -> Strip:
        width, height = self.size
        canvas = self._canvas
        if canvas is None or (canvas.width, canvas.height) != (width, height):
            canvas = self._canvas = self._draw(width, height)
            self._strips = []
        if not self._strips:
            self._strips = self._paint(canvas, width)
        return self._strips[y] if y < len(self._strips) else Strip.blank(width, self.rich_style)

    def _paint(self, canvas: Canvas, width: int) -> list[Strip]:
        if self._palette is None:
            self._palette = Palette(self.app.theme_variables)
        base, palette = self.rich_style, self._palette
        return [
            Strip(
                [Segment(text, base + palette[style] if style else base) for text, style in row],
                width,
            )
            for row in (list(canvas.row(y)) for y in range(canvas.height))
        ]

    @property
    def plain(self) -> str:
        """What is drawn, as text."""
        canvas = self._canvas or self._draw(self.size.width, self.size.height)
        return "\n".join(canvas.plain())
