"""One message on the screen: who said it, the thought apart, the text, the figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.events import Click
from textual.geometry import Size
from textual.message import Message
from textual.reactive import Reactive
from textual.widget import Widget
from textual.widgets import Static

from ..conversation import ChatMessage, stats_line
from ..display_text import Cleaner, ReplyParts, clean, code_blocks, split_thinking
from .tokens import TokenText

if TYPE_CHECKING:
    from .markdown import GrowingMarkdown

_LINES, _CHARS = 14, 1600  # of a user's message shown before it is folded


class ClickLine(Static, can_focus=False):
    """A line of text that runs an action of ``owner`` when it is clicked."""

    def __init__(self, owner: Widget, action: str, classes: str) -> None:
        super().__init__("", classes=classes, markup=False)
        self._owner, self._action = owner, action

    async def on_click(self, event: Click) -> None:
        event.stop()
        await self.app.run_action(self._action, self._owner)


def _key(key: str, action: str, name: str, id: str, help_text: str) -> Binding:
    """A key on a message: ``name`` for the footer, ``help_text`` for the help."""
    return Binding(key, action, name, id=id, tooltip=f"message: {help_text}")


class MessageView(Vertical, can_focus=True):
    """Shows a message; ``refresh_message`` is to be called after every change of it."""

    BINDINGS: ClassVar = [
        _key("c", "copy", "Copy", "message.copy", "copy it"),
        _key("y", "copy_code", "Copy code", "message.code", "copy its next code"),
        _key("e", "edit", "Edit", "message.edit", "edit it and send again"),
        _key("r", "regenerate", "Write again", "message.regenerate", "write it again"),
        _key("t,enter", "unfold", "Open/close", "message.unfold", "open or close"),
        Binding("up,k", "app.focus_previous", "Previous", show=False),
        Binding("down,j", "app.focus_next", "Next", show=False),
    ]

    class CopyWanted(Message):
        """``text`` is to be copied; ``what`` names it."""

        def __init__(self, text: str, what: str) -> None:
            super().__init__()
            self.text, self.what = text, what

    class ChangeWanted(Message):
        """The message is to be edited, or else written again."""

        def __init__(self, view: MessageView, edit: bool) -> None:
            super().__init__()
            self.view, self.edit = view, edit

    # The children were laid out before the size is reported: no further layout is needed.
    virtual_size = Reactive(Size(0, 0))

    def __init__(self, message: ChatMessage, show_origin: bool = False) -> None:
        super().__init__(classes=f"message {message.role}")
        self.message = message
        self._origin = show_origin
        self._cleaner = Cleaner()
        self._clean = ""
        self._taken = 0  # characters of message.text already cleaned
        self._fed = 0  # characters of the answer already in the Markdown
        self._open = False
        self._code = 0  # code blocks copied so far
        self._parts = ReplyParts("", "")
        self._ready = False
        self._shown_lines: dict[Static, str] = {}  # what the small lines show
        # Kept, because a reply uses them in every round.
        self._head, self._thought, self._note, self._user_text = (
            Static("", classes=name, markup=False) for name in ("head", "thought", "note", "body")
        )
        self._fold = ClickLine(self, "unfold", "fold")
        self._body: GrowingMarkdown | TokenText | None = None

    def compose(self) -> ComposeResult:
        if self.message.role == "user":
            yield from (self._head, self._user_text, self._fold)
        else:
            yield from (self._head, self._fold, self._thought, self._note)

    def on_mount(self) -> None:
        self._ready = True
        if self.message.role == "user":
            self._show_user()
        else:
            self.refresh_message()

    async def leave(self) -> None:
        """Remove the view; later changes of the message are not shown."""
        self._ready = False  # its lines are removed first
        await self.remove()

    # What is shown

    def _show_user(self) -> None:
        text = clean(self.message.text)
        lines = text.split("\n")
        shown = "\n".join(lines[:_LINES])[:_CHARS]
        hidden = len(text) > len(shown)
        self._head.update("You")
        self._user_text.update(text if self._open else shown)
        self._fold.display = hidden
        if len(lines) > _LINES:
            more = f"{len(lines) - _LINES:,} more lines"
        else:
            more = f"{len(text) - len(shown):,} more characters"
        self._fold.update("▾ Show less" if self._open else f"▸ {more}")

    def refresh_message(self, waiting: str = "") -> None:
        """Bring the screen up to the message's present text and state."""
        if self.message.role == "user" or not self._ready:
            return
        message = self.message
        if len(message.text) > self._taken:
            self._clean += self._cleaner.feed(message.text[self._taken :])
            self._taken = len(message.text)
        if not message.streaming:
            self._clean += self._cleaner.end()
        self._parts = split_thinking(self._clean, message.expects_thinking)
        if not message.streaming and self._parts.thinking_open and not self._parts.thinking:
            self._parts = ReplyParts("", self._clean)
        self._show_head(waiting)
        self._show_thought()
        if self._origin and message.spans:
            self._show_tokens()
        else:
            self._show_answer()

    def _show_head(self, waiting: str) -> None:
        message = self.message
        head = "Assistant"
        if message.streaming:
            head += f"  {waiting}" if waiting else "  writing…"
        elif line := stats_line(message.stats):
            head += f"  {line}"
        self._set_line(self._head, head)
        notes = {
            "stopped": "■ Stopped.",
            "length": "■ Cut at the token limit (max tokens or context).",
            "interrupted": "■ The program ended while this was written. Ctrl+R writes it again.",
            "error": f"✗ {clean(message.note)}",
        }
        note = self._note
        self._set_line(note, notes.get(message.state, ""))
        note.display = message.state in notes
        note.set_class(message.state == "error", "error")

    def _set_line(self, line: Static, text: str) -> None:
        """Put ``text`` into a line; only a change, as every update lays the screen out again."""
        if self._shown_lines.get(line) != text:
            self._shown_lines[line] = text
            line.update(text)

    def _show_thought(self) -> None:
        thought, fold, parts = self._thought, self._fold, self._parts
        fold.display = bool(parts.thinking) and not self._origin
        thought.display = fold.display and self._open
        if not fold.display:
            return
        words = len(parts.thinking.split())
        state = "Thinking…" if parts.thinking_open and self.message.streaming else "Thought"
        self._set_line(fold, f"{'▾' if self._open else '▸'} {state} ({words:,} words)")
        if thought.display:
            self._set_line(thought, parts.thinking)

    def _show_answer(self) -> None:
        # Deferred: parsing and highlighting are a third of the app's start.
        from .markdown import GrowingMarkdown

        answer, body = self._parts.answer, self._body
        if isinstance(body, GrowingMarkdown) and self._fed <= len(answer):
            body.feed(answer[self._fed :])
        else:  # the first text, or what was shown became a thought
            self._show_body(GrowingMarkdown(answer) if answer else None)
        self._fed = len(answer)

    def _show_tokens(self) -> None:
        if isinstance(self._body, TokenText):
            self._body.extend(self.message.spans)
        else:
            self._show_body(TokenText(self.message.spans))

    def _show_body(self, body: GrowingMarkdown | TokenText | None) -> None:
        """Show ``body`` in place of the present one."""
        if self._body is not None:
            self._body.remove()
        self._body = body
        if body is not None:
            self.mount(body, before=self._note)

    def show_origin(self, on: bool) -> None:
        """Colour tokens by origin, or show Markdown."""
        if on != self._origin:
            self._origin = on
            self.refresh_message()

    # What can be done with it

    def action_copy(self) -> None:
        self.post_message(self.CopyWanted(self.message.text, "message"))

    def action_copy_code(self) -> None:
        """Copy the next code block, each in turn."""
        if blocks := code_blocks(self.message.text):
            number = self._code % len(blocks)
            self._code += 1
            what = f"code block {number + 1} of {len(blocks)}"
            self.post_message(self.CopyWanted(blocks[number], what))

    def action_edit(self) -> None:
        self.post_message(self.ChangeWanted(self, edit=True))

    def action_regenerate(self) -> None:
        self.post_message(self.ChangeWanted(self, edit=False))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "copy_code":
            return bool(code_blocks(self.message.text))
        owner = {"edit": "user", "regenerate": "assistant"}.get(action)
        return owner in (None, self.message.role)

    def action_unfold(self) -> None:
        self._open = not self._open
        if self.message.role == "user":
            self._show_user()
        else:
            self._show_thought()
