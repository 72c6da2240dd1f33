"""The open conversations: which one is current, and which of them are seen."""

from __future__ import annotations

from textual.containers import Horizontal
from textual.dom import DOMNode
from textual.widget import Widget

from .lined import Grounded
from .pane import Pane


class Panes(Horizontal, Grounded):
    """One pane for each conversation; one is seen, or two side by side.

    There is always at least one once the screen is up; the current one's input
    box has the focus whenever another is shown.
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.at = 0  # position of the current pane
        self.split = False

    @property
    def all(self) -> list[Pane]:
        return [child for child in self.children if isinstance(child, Pane) and not child.leaving]

    @property
    def current(self) -> Pane:
        panes = self.all
        return panes[min(self.at, len(panes) - 1)]

    @property
    def never_begun(self) -> list[Pane]:
        """Panes with neither a message nor a draft: not worth a tab beside a real chat."""
        return [p for p in self.all if not p.conversation.messages and not p.prompt.text.strip()]

    def place_of(self, session: int | None) -> int | None:
        """Position of the pane that has a saved session open."""
        if session is None:
            return None
        places = (i for i, pane in enumerate(self.all) if pane.conversation.session == session)
        return next(places, None)

    def holding(self, widget: DOMNode) -> Pane:
        """The pane that ``widget`` is in."""
        return next(pane for pane in self.all if pane in widget.ancestors)

    def show(self, index: int) -> None:
        """Make a pane the current one; counts around the ends."""
        panes = self.all
        self.at = index % len(panes)
        other = (self.at + 1) % len(panes)
        visible = {self.at, other} if self.split and len(panes) > 1 else {self.at}
        for number, pane in enumerate(panes):
            pane.display = number in visible
        # The one typed into may be either; focus follows the tab.
        self.current.prompt.focus()

    def follow_focus(self, focused: Widget | None) -> bool:
        """With two side by side the focused one is the current one; whether that changed."""
        if focused is None:
            return False
        for index, pane in enumerate(self.all):
            if pane in focused.ancestors and index != self.at:
                self.at = index
                return True
        return False
