"""The input box: several lines, history, Enter sends, a paste stays one message."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual import events
from textual.binding import Binding
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widgets import TextArea

from ..display_text import clean


def _key(key: str, action: str, id: str, help_text: str, shown: str | None = None) -> Binding:
    """A key of the input box; ``shown`` is how it is written in the footer, if it is there."""
    name = help_text.capitalize()
    return Binding(key, action, name, bool(shown), shown, id=id, tooltip=help_text)


class PromptBox(TextArea):
    """``history()`` returns earlier inputs, oldest first, when they are wanted."""

    BINDINGS: ClassVar = [
        # Terminal.app sends the same code for Enter and Shift+Enter, hence Ctrl+J first.
        _key("ctrl+j,shift+enter,alt+enter", "newline", "prompt.newline", "new line", "^j"),
        _key("pageup", "page(-1)", "prompt.page_up", "scroll the chat up"),
        _key("pagedown", "page(1)", "prompt.page_down", "scroll the chat down"),
        Binding("up", "up", show=False),
        Binding("down", "down", show=False),
    ]

    class Sent(Message):
        def __init__(self, prompt: PromptBox, text: str) -> None:
            super().__init__()
            self.prompt, self.text = prompt, text

    class Paged(Message):
        """A page up (-1) or down (1) of the chat is wanted."""

        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step

    def __init__(self, history: Callable[[], list[str]]) -> None:
        super().__init__(
            soft_wrap=True,
            tab_behavior="focus",
            show_line_numbers=False,
            compact=True,
            placeholder="Ask anything. Enter sends, Ctrl+J starts a new line.",
            highlight_cursor_line=False,
        )
        self.cursor_blink = False  # an idle chat would paint twice a second
        self._history = history
        self._back = 0  # 0: the draft itself, n: the n-th newest input
        self._draft = ""

    async def on_key(self, event: events.Key) -> None:
        # Not a priority binding: it would overtake keys that still wait in the queue, and Enter
        # typed fast after a text would find an empty box.
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            self.action_send()

    def action_send(self) -> None:
        if self.text.strip():
            self._back = 0
            self.post_message(self.Sent(self, self.text))

    def action_newline(self) -> None:
        self.replace("\n", *self.selection, maintain_selection_offset=False)

    def action_up(self) -> None:
        if self.cursor_location[0] == 0 and not self.wrapped_document_above():
            self._recall(+1)
        else:
            self.action_cursor_up()

    def action_down(self) -> None:
        if self._back and self.cursor_location[0] == self.document.line_count - 1:
            self._recall(-1)
        else:
            self.action_cursor_down()

    def action_page(self, step: int) -> None:
        """Scroll the text typed if it is longer than the box, else the chat."""
        if self.wrapped_document.height <= self.content_size.height:
            self.post_message(self.Paged(step))
        elif step < 0:
            self.action_cursor_page_up()
        else:
            self.action_cursor_page_down()

    def wrapped_document_above(self) -> bool:
        """Whether a wrapped part of the first line lies above the cursor."""
        return self.wrapped_document.location_to_offset(self.cursor_location).y > 0

    def _recall(self, step: int) -> None:
        inputs = self._history()
        back = self._back + step
        if not 0 <= back <= len(inputs):
            return
        if self._back == 0:
            self._draft = self.text
        self._back = back
        self.put(self._draft if back == 0 else inputs[-back])

    def put(self, text: str) -> None:
        """Replace all of the text; the cursor goes to its end."""
        self.load_text(text)
        self.move_cursor(self.document.end)

    def render_lines(self, crop: Region) -> list[Strip]:
        try:
            return super().render_lines(crop)
        except KeyError:
            # Mounted below a dialog a moment ago: painted before its styles were found.
            return [Strip.blank(crop.width)] * crop.height

    async def on_paste(self, event: events.Paste) -> None:
        # Control codes in a paste would be sent to the model and shown as garbage.
        event.prevent_default()
        event.stop()
        edit = self.replace(clean(event.text), *self.selection, maintain_selection_offset=False)
        self.move_cursor(edit.end_location)
        self.focus()
