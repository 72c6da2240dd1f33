"""Colours: two themes of our own, and the chart colours for any theme.

The chart colours are the Okabe-Ito palette (jfly.uni-koeln.de/color), which can be told apart with
every common colour vision. On a light background they are darkened for contrast; with NO_COLOR,
which shows a colour as a grey, they are greys that can be told apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from textual.theme import BUILTIN_THEMES, Theme

# Colour on a dark and on a light background, grey on a dark and on a light background.
_CHART_COLOURS = {
    "draft": ("#56B4E9", "#0060A0", "#FFFFFF", "#000000"),
    "target": ("#E69F00", "#8A5A00", "#C4C4C4", "#4C4C4C"),
    "reject": ("#F0824A", "#B03A00", "#E2E2E2", "#262626"),
    "predicted": ("#D493B8", "#9A3F78", "#8C8C8C", "#868686"),
    "measured": ("#56B4E9", "#0060A0", "#FFFFFF", "#000000"),
    "good": ("#35C79A", "#00704F", "#FFFFFF", "#000000"),
}

DARK = Theme(
    name="dspark-dark",
    primary="#56B4E9",
    secondary="#8AA4BF",
    accent="#E69F00",
    foreground="#D8DEE6",
    background="#12161B",
    surface="#191F26",
    panel="#222A33",
    success="#35C79A",
    warning="#E69F00",
    error="#F0824A",
    dark=True,
)
LIGHT = Theme(
    name="dspark-light",
    primary="#0060A0",
    secondary="#4A6076",
    accent="#8A5A00",
    foreground="#1D242C",
    background="#FBFBF9",
    surface="#F1F2F0",
    panel="#E4E7E8",
    success="#00704F",
    warning="#8A5A00",
    error="#B03A00",
    dark=False,
)


def known() -> list[str]:
    """The names of all themes: ours and Textual's."""
    return [DARK.name, LIGHT.name, *sorted(BUILTIN_THEMES)]


def chart_colours(dark: bool, no_color: bool = False) -> dict[str, str]:
    """Hex colours by chart style name, as ``dspark-NAME`` theme variables."""
    column = 2 * no_color + (not dark)
    return {f"dspark-{name}": colours[column] for name, colours in _CHART_COLOURS.items()}


def preferred(environ: Mapping[str, str]) -> str:
    """Our theme for this terminal: the light one where COLORFGBG says so."""
    background = environ.get("COLORFGBG", "").rpartition(";")[2]
    return LIGHT.name if background in ("7", "15") else DARK.name
