"""The theme's colours as Rich needs them: prose and code are laid out by Rich."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.theme import Theme
from textual.color import Color
from textual.strip import Strip

# Kind of text: theme variable of its colour (or none), the rest of its style.
_PROSE = {
    "markdown.h1": ("primary", "bold"),
    "markdown.h2": ("primary", "bold underline"),
    "markdown.h3": ("primary", "bold"),
    "markdown.h4": ("primary", "underline"),
    "markdown.h5": ("primary", "bold"),
    "markdown.h6": ("foreground-muted", "bold"),
    "markdown.h7": ("foreground-muted", ""),
    "markdown.code": ("accent", ""),
    "markdown.link": ("primary", "underline"),
    "markdown.link_url": ("primary", "underline"),
    "markdown.block_quote": ("foreground-muted", ""),
    "markdown.item.bullet": ("primary", ""),
    "markdown.item.number": ("primary", ""),
    "markdown.hr": ("foreground-muted", ""),
    "markdown.table.border": ("foreground-muted", ""),
    "markdown.table.header": ("", "bold"),
}

_CHART = {"title": "bold", "active": "bold reverse"}


def solid(variables: Mapping[str, str], colour: str) -> str:
    """A theme's colour without alpha, which Rich does not have; empty for a terminal's own."""
    if not colour.startswith("#"):
        return ""
    if len(colour) <= 7:
        return colour
    background = Color.parse(variables.get("background", "#000000"))
    return background.blend(Color.parse(colour[:7]), int(colour[7:9], 16) / 255).hex6


def text_style(variables: Mapping[str, str], name: str, more: str = "") -> Style:
    """A style in the colour of a theme variable, where it has one."""
    return Style.parse(f"{more} {solid(variables, variables.get(name, ''))}".strip() or "none")


class RichTheme:
    """The theme's colours for Rich; ``console`` lays out text in them and prints nowhere."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = variables
        self._chart_styles: dict[str, Style] = {"": Style()}
        styles = {name: text_style(variables, *how) for name, how in _PROSE.items()}
        background = solid(variables, variables.get("surface", ""))
        styles["code.background"] = Style(bgcolor=background) if background else Style()
        self.console = Console(
            file=io.StringIO(),
            force_terminal=True,
            color_system="truecolor",
            legacy_windows=False,
            highlight=False,
            theme=Theme(styles),
            _environ={},  # the app decides on size and colours
        )

    def chart_style(self, name: str) -> Style:
        """The style for a style name of a canvas, such as ``draft`` or ``reject-strike``."""
        if name not in self._chart_styles:
            kind, _, extra = name.partition("-")
            muted = kind in ("axis", "dim", "plain")
            variable = "foreground-muted" if muted else f"dspark-{kind}"
            variable = variable if variable in self.variables else "foreground"
            style = text_style(self.variables, variable, f"{_CHART.get(kind, '')} {extra}")
            if muted and style.color is None:
                style += Style(dim=True)  # "auto" and ANSI themes: the terminal's own colours
            self._chart_styles[name] = style
        return self._chart_styles[name]

    def strips(self, renderable: Any, width: int) -> list[Strip]:
        """The lines that Rich makes of ``renderable``."""
        width = max(2, width)  # the widest letter needs two; Rich fails on less
        options = self.console.options.update(width=width)
        lines = self.console.render_lines(renderable, options, pad=True)
        return [Strip(line, width) for line in lines]


@lru_cache(maxsize=2)
def _rich_theme(variables: tuple[tuple[str, str], ...]) -> RichTheme:
    return RichTheme(dict(variables))


def rich_theme(variables: Mapping[str, str]) -> RichTheme:
    """The Rich theme for a Textual theme, made once."""
    return _rich_theme(tuple(variables.items()))
