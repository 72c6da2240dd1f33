"""Everything here uses private names of Textual, to be faster or to mend a fault.

Each patch checks that the names it needs are there. If one is missing or has changed, or if
``enabled`` is False (``dspark-chat --no-patches``), the app runs Textual's own way instead. No
other part of the chat uses a private name of Textual.
"""

from __future__ import annotations

from typing import Any

from textual.driver import Driver
from textual.screen import Screen

enabled = True


def use_sparing_compositor(screen: Screen[Any]) -> None:
    """Have ``screen`` render only the rows that it paints; see ``compositor``."""
    if enabled:
        try:
            from . import compositor
        except ImportError:
            return
        compositor.install(screen)


def driver_class(usual: type[Driver]) -> type[Driver]:
    """A driver that reads pastes whole, in place of Textual's for Unix; see ``pasting``."""
    if enabled:
        try:
            from . import pasting
        except ImportError:
            return usual
        if usual is pasting.PasteDriver.__base__:
            return pasting.PasteDriver
    return usual
