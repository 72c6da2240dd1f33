"""Colours: two themes of our own, and the chart colours for any theme.

The chart colours are the Okabe-Ito palette (jfly.uni-koeln.de/color), told apart
with every common colour vision; on light ground they are darkened for contrast.
Nothing is told by colour alone, so NO_COLOR loses no information.
"""

from __future__ import annotations

from collections.abc import Mapping

from textual.theme import BUILTIN_THEMES, Theme

_DARK = {
    "draft": "#56B4E9",
    "target": "#E69F00",
    "reject": "#F0824A",
    "predicted": "#D493B8",
    "measured": "#56B4E9",
    "good": "#35C79A",
}
_LIGHT = {
    "draft": "#0060A0",
    "target": "#8A5A00",
    "reject": "#B03A00",
    "predicted": "#9A3F78",
    "measured": "#0060A0",
    "good": "#00704F",
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


def chart_colours(dark: bool) -> dict[str, str]:
    """Hex colours by chart style name, as ``dspark-NAME`` theme variables."""
    return {f"dspark-{name}": colour for name, colour in (_DARK if dark else _LIGHT).items()}


def preferred(environ: Mapping[str, str]) -> str:
    """Our theme for this terminal: light where COLORFGBG says its ground is light."""
    ground = environ.get("COLORFGBG", "").rpartition(";")[2]
    return LIGHT.name if ground in ("7", "15") else DARK.name
