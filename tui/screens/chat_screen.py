"""The main screen: the open conversations, what they ask of the engine, and what comes back.

A turn is saved before anything is generated from it: that order is kept in ``_generate``. The
message ``SettingsWanted`` asks the app to change settings.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer

from dspark_mlx.errors import DsparkError
from dspark_mlx.events import Event, Finished
from dspark_mlx.stats import EngineStats

from .. import export, textual_patches
from ..charts import gauges
from ..conversation import Conversation
from ..engine_client import EngineClient
from ..replay import recorded_conversations
from ..session_store import SessionStore
from ..settings import Preferences
from ..widgets.chart import CHART_SECONDS, STRIP_SECONDS, Chart, Throttle
from ..widgets.live_panel import LivePanel
from ..widgets.message_view import MessageView
from ..widgets.pane import Pane, Panes
from ..widgets.prompt_box import PromptBox
from ..widgets.tab_bar import Tab, TabBar, engine_note


def _key(key: str, action: str, name: str, id: str, help_text: str, show: bool = False) -> Binding:
    """``name`` is for the footer, ``help_text`` for the help. Ctrl+key comes before widgets."""
    first = "ctrl+" in key or key in ("f6", "f7", "f8")
    return Binding(key, action, name, id=id, tooltip=help_text, priority=first, show=show)


class ChatScreen(Screen[None]):
    BINDINGS: ClassVar = [
        _key("escape", "stop", "Stop", "chat.stop", "stop the reply or leave an edit", True),
        _key("ctrl+t", "origin", "Tokens", "chat.tokens", "colour tokens by origin", True),
        _key("ctrl+l", "live", "Live", "chat.live", "charts beside the chat"),
        _key("ctrl+g", "app.monitor", "Monitor", "chat.monitor", "every chart", True),
        _key("ctrl+n", "new", "New", "chat.new", "another chat"),
        _key("ctrl+o", "sessions", "Chats", "chat.sessions", "earlier chats", True),
        _key("f1", "app.help", "Help", "chat.help", "this page", True),
        _key("ctrl+r", "regenerate", "Write again", "chat.regenerate", "write the reply again"),
        _key("f5", "app.models", "Models", "chat.models", "choose, download, load a model"),
        _key("ctrl+s", "app.settings", "Settings", "chat.settings", "settings"),
        _key("f6", "split", "Side by side", "chat.split", "two chats side by side"),
        _key("f7,ctrl+pageup", "turn(-1)", "Previous chat", "chat.previous", "previous chat"),
        _key("f8,ctrl+pagedown", "turn(1)", "Next chat", "chat.next", "next chat"),
        _key("f9", "close", "Close chat", "chat.close", "close the chat; it stays saved"),
    ]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (112, "-wide"), (170, "-huge")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-tiny"), (9, "-short"), (22, "-medium"), (34, "-tall")]  # noqa: RUF012

    class SettingsWanted(Message):
        """Settings are to be changed, for now and for the next start."""

        def __init__(self, **values: Any) -> None:
            super().__init__()
            self.values = values

    def __init__(
        self,
        engine: EngineClient,
        stats: EngineStats,
        store: SessionStore,
        preferences: Preferences,
    ) -> None:
        super().__init__()
        textual_patches.use_sparing_compositor(self)
        self.inputs: list[str] = []  # what was sent before, oldest first
        self._engine, self._stats = engine, stats
        self._store, self._preferences = store, preferences
        self._tabs = TabBar()
        self._panes = Panes(id="panes")
        self._panel = LivePanel(stats)
        self._status = Chart(lambda w, h: gauges.status_line(stats, w, h), classes="status")
        self._throttles = (
            Throttle(STRIP_SECONDS, self._redraw_strips),
            Throttle(CHART_SECONDS, self._panel.redraw),
        )

    def compose(self) -> ComposeResult:
        yield self._tabs
        with Horizontal(id="body"):
            yield self._panes
            yield self._panel
        yield self._status
        yield Footer(compact=True)

    async def on_mount(self) -> None:
        self.set_class(self._preferences.now.live_panel, "-live")
        if not await self.open_session(self._store.unsent()):
            await self.action_new()
        self.set_interval(1.0, self.save_now)

    # Panes

    @property
    def panes(self) -> list[Pane]:
        return self._panes.all

    @property
    def pane(self) -> Pane:
        return self._panes.current

    async def open(self, conversation: Conversation) -> Pane:
        """Show a conversation in a new pane, or the pane that has it already."""
        place = self._panes.place_of(conversation.session)
        if place is not None:
            self.show(place)
            return self.pane
        pane = Pane(
            conversation, self._stats, self._preferences.now.token_colours, lambda: self.inputs
        )
        empty = self._panes.never_begun
        await self._panes.mount(pane)
        if conversation.messages or conversation.draft:
            for old in empty:
                await old.leave()
        self.show(self.panes.index(pane))
        return pane

    async def open_session(self, session: int | None) -> bool:
        """Open a saved conversation; returns False if there is none."""
        conversation = self._store.load(session) if session is not None else None
        if conversation is not None:
            await self.open(conversation)
        return conversation is not None

    def show(self, index: int) -> None:
        self._panes.show(index)
        self.update_tabs()

    @on(TabBar.Chosen)
    def chosen(self, event: TabBar.Chosen) -> None:
        self.show(event.index)

    def on_descendant_focus(self) -> None:
        if self._panes.follow_focus(self.focused):
            self.update_tabs()

    def update_tabs(self) -> None:
        """Bring the top row up to date."""
        if not self.is_mounted:
            return
        tabs = tuple(
            Tab(pane.conversation.name, index == self._panes.at, bool(pane.conversation.active))
            for index, pane in enumerate(self.panes)
        )
        asked = None if self._engine.replay else self._preferences.now
        self._tabs.show(tabs, engine_note(self._stats, self._engine.wanted, asked))

    def show_settings(self) -> None:
        """Show what the settings say now."""
        settings = self._preferences.now
        if self.has_class("-live") != settings.live_panel:
            self.set_class(settings.live_panel, "-live")
            self.call_after_refresh(self.redraw)
        for pane in self.panes:
            pane.show_origin(settings.token_colours)
        self.update_tabs()

    # Events of the engine

    async def handle_events(self, events: Iterable[Event]) -> None:
        """Pass events on to the conversations whose requests they are about."""
        changed: set[Pane] = set()
        for event in events:
            if self._engine.replay:  # it plays requests that nobody typed here
                known = [pane.conversation.active for pane in self.panes]
                for conversation in recorded_conversations(event, known):
                    await self.open(conversation)
                    self._stats.request(conversation.active or "").label = conversation.name
            for pane in self.panes:
                reply = pane.conversation.reply
                if pane.conversation.apply(event):
                    changed.add(pane)
                    if isinstance(event, Finished) and reply is not None:
                        self._store.later(self._store.update, reply)
        # Painting below the monitor would have all of that painted anew.
        if self.app.screen is self or self.app.screen.is_modal:
            for pane in changed:
                pane.follow()
        self.update_tabs()

    def on_screen_resume(self) -> None:
        for pane in self.panes:
            pane.follow()

    def tick(self, news: bool) -> None:
        """Paint the charts that are due; the text has followed its events already."""
        for throttle in self._throttles:
            throttle.tick(news)

    def redraw(self) -> None:
        """Paint everything that shows the statistics, now."""
        self.update_tabs()
        self._redraw_strips()
        self._panel.redraw()

    def _redraw_strips(self) -> None:
        self._status.redraw()
        for pane in self.panes:
            if pane.display:
                pane.redraw()

    # Turns

    async def ask(self, pane: Pane, text: str) -> None:
        """The user's turn, and a reply to it."""
        pane.conversation.ask(text)
        pane.conversation.draft = ""
        self.inputs.append(text)
        await self._generate(pane)

    @on(PromptBox.Sent)
    async def sent(self, event: PromptBox.Sent) -> None:
        """The user's turn; it replaces the turn being edited, and all turns after that."""
        pane = self._panes.holding(event.prompt)
        if pane.conversation.active:
            self.notify("Still writing. Esc stops the reply; your text stays here.")
            return
        if pane.editing is not None:
            position, pane.editing = pane.editing, None
            self._store.forget(pane.conversation.truncate(position))
        pane.prompt.put("")
        await self.ask(pane, event.text)

    async def regenerate(self, pane: Pane, position: int) -> None:
        """Write the reply at ``position`` again; the turns after it are dropped."""
        conversation = pane.conversation
        if conversation.active or position < 0:
            return
        if conversation.messages[position].role == "assistant":
            self._store.forget(conversation.truncate(position))
        if conversation.messages:
            await self._generate(pane)

    async def _generate(self, pane: Pane) -> None:
        conversation = pane.conversation
        try:
            request = conversation.request(f"c{secrets.token_hex(4)}", self._preferences.now)
        except DsparkError as error:
            self.notify(str(error), severity="error", markup=False)
            await pane.sync()
            return
        self._save(conversation)  # before anything is generated from it
        self._stats.request(request.id).label = conversation.name
        self._engine.submit(request)  # before anything is awaited: Esc must find it submitted
        await pane.sync()
        pane.to_end()
        pane.follow()
        self.update_tabs()

    # Saving

    @property
    def _model_name(self) -> str:
        loaded = self._stats.loaded
        return loaded.model if loaded else self._engine.wanted

    def _save(self, conversation: Conversation) -> None:
        """Put the conversation on disk now; a full disk does not stop the chat."""
        try:
            self._store.save(conversation, self._model_name)
        except Exception as error:
            self.notify(f"Not saved: {error}", severity="error", markup=False)

    def save_now(self) -> None:
        """Save what replies have grown by, and drafts; called once a second."""
        for pane in self.panes:
            self._store.autosave(pane.conversation, self._model_name)

    # Actions

    def action_stop(self) -> None:
        pane = self.pane
        if pane.editing is not None:
            pane.end_edit()
        elif not self.stop() and self._stats.loading is not None:
            self._engine.cancel_load()
        pane.prompt.focus()

    def stop(self) -> bool:
        """Stop the current pane's reply; returns whether there was one."""
        active = self.pane.conversation.active
        if active:
            self._engine.cancel(active)
        return bool(active)

    async def action_new(self) -> None:
        await self.open(Conversation(system=self._preferences.now.system))

    async def action_close(self) -> None:
        pane = self.pane
        reply = pane.conversation.reply
        if self.stop() and reply is not None:
            # This pane will not see the request's Finished any more.
            pane.conversation.abandon()
            self._store.later(self._store.update, reply)
        self.save_now()
        await self._remove(pane)
        self.show(max(0, self._panes.at - 1))

    async def _remove(self, pane: Pane) -> None:
        """Take a pane away; there is always another."""
        if len(self.panes) == 1:
            await self.action_new()
        await pane.leave()

    def action_turn(self, step: int) -> None:
        self.show(self._panes.at + step)

    async def action_split(self) -> None:
        self._panes.split = not self._panes.split
        if self._panes.split and len(self.panes) == 1:
            await self.action_new()
        self.show(self._panes.at)

    def action_origin(self) -> None:
        wanted = not self._preferences.now.token_colours
        self.post_message(self.SettingsWanted(token_colours=wanted))

    def action_live(self) -> None:
        wanted = not self._preferences.now.live_panel
        self.post_message(self.SettingsWanted(live_panel=wanted))

    async def action_regenerate(self) -> None:
        await self.regenerate(self.pane, len(self.pane.conversation.messages) - 1)

    def action_copy_reply(self, code: bool = False) -> None:
        """Copy the reply, or its next code block."""
        view = self.pane.view_of_reply()
        if view is not None:
            view.action_copy_code() if code else view.action_copy()

    @on(MessageView.ChangeWanted)
    async def change_message(self, event: MessageView.ChangeWanted) -> None:
        pane, message = self._panes.holding(event.view), event.view.message
        messages = pane.conversation.messages
        position = next((i for i, m in enumerate(messages) if m is message), None)
        if position is None:
            return
        if pane.conversation.active:
            self.notify("Still writing. Esc stops the reply.")
        elif event.edit:
            pane.begin_edit(position)
        else:
            await self.regenerate(pane, position)

    def action_export(self, kind: str) -> None:
        export.save_and_notify(self.pane.conversation, kind, self.notify)

    def action_system_prompt(self) -> None:
        from .dialogs import AskText

        conversation = self.pane.conversation

        def done(text: str | None) -> None:
            if text is not None:
                conversation.system = text
                if conversation.session is not None:
                    self._save(conversation)
                self.notify("System prompt set for this chat.")

        self.app.push_screen(
            AskText("System prompt of this chat", conversation.system, several=True), done
        )

    def action_rename(self) -> None:
        from .dialogs import AskText

        conversation = self.pane.conversation

        def done(title: str | None) -> None:
            if title and title.strip():
                conversation.title = title.strip()
                if conversation.session is not None:
                    self._store.rename(conversation.session, conversation.title)
                self.update_tabs()

        self.app.push_screen(AskText("Title of this chat", conversation.title), done)

    def action_sessions(self) -> None:
        """Earlier chats: open one; those renamed or deleted there change here too."""
        from .session_list import SessionList

        async def opened(session: int | None) -> None:
            await self.open_session(session)

        def deleted(session: int) -> None:
            self.run_worker(self._deleted(session))

        self.save_now()
        self.app.push_screen(SessionList(self._store, deleted, self._renamed), opened)

    def _renamed(self, session: int, title: str) -> None:
        for pane in self.panes:
            if pane.conversation.session == session:
                pane.conversation.title = title
        self.update_tabs()

    async def _deleted(self, session: int) -> None:
        """A session is being deleted: its reply stops, its pane goes."""
        for pane in self.panes:
            conversation = pane.conversation
            if conversation.session == session:
                if conversation.active:
                    self._engine.cancel(conversation.active)
                conversation.session = None
                await self._remove(pane)
        self.show(min(self._panes.at, len(self.panes) - 1))
