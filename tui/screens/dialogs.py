"""Small questions over the chat: yes or no, and text of one or several lines."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static, TextArea


class Confirm(ModalScreen[bool]):
    BINDINGS: ClassVar = [
        Binding("escape,n", "dismiss(False)", "No"),
        Binding("y", "dismiss(True)", "Yes"),
        Binding("left,right", "app.focus_next", show=False),
    ]

    def __init__(self, question: str, yes: str = "Yes", no: str = "No") -> None:
        super().__init__(classes="dialog")
        self._question, self._yes, self._no = question, yes, no

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(self._question, markup=False)
            with Horizontal(classes="buttons"):
                yield Button(self._yes, id="yes", variant="primary")
                yield Button(self._no, id="no")

    @on(Button.Pressed)
    def pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")


class AskText(ModalScreen[str | None]):
    """A line of text, or with ``several`` lines of it; ends with None if cancelled."""

    BINDINGS: ClassVar = [
        Binding("escape", "dismiss(None)", "Cancel"),
        Binding("ctrl+s", "accept", "Accept", priority=True),
    ]

    def __init__(self, question: str, value: str = "", several: bool = False) -> None:
        super().__init__(classes="dialog")
        self._question, self._several = question, several
        self._field: Input | TextArea = (
            TextArea(value, compact=True, show_line_numbers=False) if several else Input(value)
        )

    def compose(self) -> ComposeResult:
        with Vertical(classes="box tall" if self._several else "box"):
            yield Static(self._question, markup=False)
            yield self._field
            key = "Ctrl+S" if self._several else "Enter"
            yield Static(f"{key} accepts, Esc cancels", classes="hint", markup=False)

    @on(Input.Submitted)
    def action_accept(self) -> None:
        field = self._field
        self.dismiss(field.text if isinstance(field, TextArea) else field.value)
