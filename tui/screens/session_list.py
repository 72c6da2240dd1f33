"""The list of conversations: search, resume, rename, delete, export."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, OptionList, Static
from textual.widgets.option_list import Option

from .. import export
from ..display_text import one_line
from ..session_store import SessionEntry, SessionStore
from .dialogs import AskText, Confirm


class SessionList(ModalScreen[int | None]):
    """Ends with the session to open. ``deleted`` and ``renamed`` are called for each change."""

    BINDINGS: ClassVar = [
        Binding("escape", "dismiss(None)", "Close"),
        Binding("slash,ctrl+f", "search", "Search"),
        Binding("r,f2", "rename", "Rename"),
        Binding("d,delete", "delete", "Delete"),
        Binding("m", "export('md')", "Markdown"),
        Binding("j", "export('json')", "JSON"),
    ]

    def __init__(
        self,
        store: SessionStore,
        deleted: Callable[[int], None],
        renamed: Callable[[int, str], None],
    ) -> None:
        super().__init__(classes="list")
        self._store, self._deleted, self._renamed = store, deleted, renamed
        self._entries: list[SessionEntry] = []

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static("Chats", classes="title", markup=False)
            yield Input(placeholder="Search titles and messages")
            yield OptionList(markup=False)
            yield Footer(compact=True)

    def on_mount(self) -> None:
        self._fill()
        self.query_one(OptionList).focus()

    @on(Input.Changed)
    def _fill(self) -> None:
        search = self.query_one(Input).value.strip()
        self._entries = self._store.entries(search)
        options = self.query_one(OptionList)
        at = options.highlighted
        options.clear_options()
        options.add_options([Option(_line(entry)) for entry in self._entries])
        if not self._entries:
            text = "Nothing found." if search else "No chats yet."
            options.add_option(Option(Content(text), disabled=True))
        else:
            options.highlighted = min(at or 0, len(self._entries) - 1)

    @property
    def chosen(self) -> SessionEntry | None:
        at = self.query_one(OptionList).highlighted
        return self._entries[at] if at is not None and at < len(self._entries) else None

    @on(OptionList.OptionSelected)
    def open(self) -> None:
        if self.chosen:
            self.dismiss(self.chosen.session)

    @on(Input.Submitted)
    def to_list(self) -> None:
        self.query_one(OptionList).focus()

    def action_search(self) -> None:
        self.set_focus(self.query_one(Input))  # at once: the next key may be here already

    def action_rename(self) -> None:
        entry = self.chosen
        if entry is None:
            return

        def done(title: str | None) -> None:
            if title and title.strip():
                self._store.rename(entry.session, title.strip())
                self._renamed(entry.session, title.strip())
                self._fill()

        self.app.push_screen(AskText("New title", entry.title), done)

    def action_delete(self) -> None:
        entry = self.chosen
        if entry is None:
            return

        def done(yes: bool | None) -> None:
            if yes:
                self._deleted(entry.session)
                self._store.delete(entry.session)
                self._fill()

        title = one_line(entry.title or "untitled", 40)
        self.app.push_screen(Confirm(f"Delete “{title}” for good?", "Delete", "Keep"), done)

    def action_export(self, kind: str) -> None:
        entry = self.chosen
        conversation = self._store.load(entry.session) if entry else None
        if conversation is not None:
            export.save_and_notify(conversation, kind, self.notify)


def _line(entry: SessionEntry) -> Content:
    form = "%H:%M" if time.time() - entry.updated < 86_400 else "%Y-%m-%d"
    when = time.strftime(form, time.localtime(entry.updated))
    hit = f"\n    … {one_line(entry.hit, 70)}" if entry.hit else ""
    figures = f"   {when} · {entry.messages} messages" + (
        f" · {entry.model}" if entry.model else ""
    )
    title = one_line(entry.title or "(draft, not sent)", 48)
    return Content.assemble(title, (figures, "dim"), (hit, "dim"))
