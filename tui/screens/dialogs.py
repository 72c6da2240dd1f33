"""Small questions over the chat: yes or no, a line of text, several lines of text."""

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
        Binding("escape,n", "no", "No"),
        Binding("y", "yes", "Yes"),
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

    @on(Button.Pressed, "#yes")
    def action_yes(self) -> None:
        self.dismiss(True)

    @on(Button.Pressed, "#no")
    def action_no(self) -> None:
        self.dismiss(False)


class AskLine(ModalScreen[str | None]):
    """One line of text; None when the user thought better of it."""

    BINDINGS: ClassVar = [Binding("escape", "dismiss(None)", "Cancel")]

    def __init__(self, question: str, value: str = "") -> None:
        super().__init__(classes="dialog")
        self._question, self._value = question, value

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(self._question, markup=False)
            yield Input(self._value)
            yield Static("Enter accepts, Esc cancels", classes="hint", markup=False)

    @on(Input.Submitted)
    def accept(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)


class AskText(ModalScreen[str | None]):
    """Several lines, such as a system prompt."""

    BINDINGS: ClassVar = [
        Binding("escape", "dismiss(None)", "Cancel"),
        Binding("ctrl+s", "accept", "Accept", priority=True),
    ]

    def __init__(self, question: str, value: str = "") -> None:
        super().__init__(classes="dialog")
        self._question, self._value = question, value

    def compose(self) -> ComposeResult:
        with Vertical(classes="box tall"):
            yield Static(self._question, markup=False)
            yield TextArea(self._value, compact=True, show_line_numbers=False)
            yield Static("Ctrl+S accepts, Esc cancels", classes="hint", markup=False)

    def action_accept(self) -> None:
        self.dismiss(self.query_one(TextArea).text)
