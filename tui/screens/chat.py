"""The main screen: open conversations, what they ask of the engine, and what comes back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import Footer

from dspark_mlx.events import Event, Finished

from ..charts import gauges
from ..compositor import SparingCompositor
from ..conversation import Conversation
from ..pace import CHART_SECONDS, STRIP_SECONDS, Pace
from ..replay import adopted
from ..saving import Autosave
from ..turns import Turns
from ..widgets.bars import Tab, TabBar, engine_note
from ..widgets.chart import Chart
from ..widgets.live import LivePanel
from ..widgets.message import MessageView
from ..widgets.pane import Pane
from ..widgets.panes import Panes
from ..widgets.prompt import Prompt

if TYPE_CHECKING:
    from ..app import ChatApp


def _key(key: str, action: str, name: str, id: str, help_text: str, show: bool = False) -> Binding:
    """``name`` for the footer, ``help_text`` for the help. Ctrl+key comes before widgets."""
    first = "ctrl+" in key or key in ("f6", "f7", "f8")
    return Binding(key, action, name, id=id, tooltip=help_text, priority=first, show=show)


class ChatScreen(Screen[None]):
    BINDINGS: ClassVar = [
        _key("escape", "stop", "Stop", "chat.stop", "stop the reply or leave an edit", True),
        _key("ctrl+t", "origin", "Tokens", "chat.tokens", "colour tokens by origin", True),
        _key("ctrl+l", "live", "Live", "chat.live", "charts beside the chat"),
        _key("ctrl+g", "app.monitor", "Monitor", "chat.monitor", "every chart", True),
        _key("ctrl+n", "new", "New", "chat.new", "another chat"),
        _key("ctrl+o", "app.sessions", "Chats", "chat.sessions", "earlier chats", True),
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

    def __init__(self) -> None:
        super().__init__()
        self._compositor = SparingCompositor()
        self._tabs = TabBar()
        self._panes = Panes(id="panes")
        self._autosave = Autosave()
        self._paces = (
            Pace(STRIP_SECONDS, self._redraw_strips),
            Pace(CHART_SECONDS, lambda: self._panel.redraw()),
        )

    @property
    def chat(self) -> ChatApp:
        return cast("ChatApp", self.app)

    def compose(self) -> ComposeResult:
        self.turns = Turns(self.chat)
        live = self.chat.live
        yield self._tabs
        with Horizontal(id="body"):
            yield self._panes
            self._panel = LivePanel(live)
            yield self._panel
        self._status = Chart(lambda w, h: gauges.status_line(live, w, h), classes="status")
        yield self._status
        yield Footer(compact=True)

    async def on_mount(self) -> None:
        unsent = self.chat.store.unsent()
        first = self.chat.store.load(unsent) if unsent else None
        await self.open(first or Conversation(system=self.chat.settings.system))
        self.set_class(self.chat.settings.live_panel, "-live")
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
        app = self.chat
        pane = Pane(conversation, app.live, app.settings.token_colours, app.inputs)
        empty = self._panes.never_begun
        await self._panes.mount(pane)
        if conversation.messages or conversation.draft:
            for old in empty:
                await old.leave()
        self.show(self.panes.index(pane))
        return pane

    def show(self, index: int) -> None:
        self._panes.show(index)
        self.tell()

    @on(TabBar.Chosen)
    def chosen(self, event: TabBar.Chosen) -> None:
        self.show(event.index)

    def on_descendant_focus(self) -> None:
        if self._panes.follow_focus(self.focused):
            self.tell()

    def tell(self) -> None:
        """Bring the top row up to date."""
        if not self.is_mounted:
            return
        tabs = tuple(
            Tab(pane.conversation.name, index == self._panes.at, bool(pane.conversation.active))
            for index, pane in enumerate(self.panes)
        )
        chat = self.chat
        asked = None if chat.replaying else chat.settings
        self._tabs.show(tabs, engine_note(chat.live, chat.engine.wanted, asked))

    # Events of the engine

    async def take(self, events: Iterable[Event]) -> None:
        """Route events to the conversations whose requests they are about."""
        changed: set[Pane] = set()
        panes = self.panes
        for event in events:
            if self.chat.replaying:
                # A recording plays requests that nobody typed here.
                for conversation in adopted(event, [p.conversation.active for p in panes]):
                    await self.open(conversation)
                    self.chat.live.request(conversation.active or "").title = conversation.name
                    panes = self.panes
            for pane in panes:
                conversation = pane.conversation
                reply = conversation.reply
                if conversation.apply(event):
                    changed.add(pane)
                    if isinstance(event, Finished) and reply is not None:
                        self._autosave.finished(self.chat.store, reply)
        # Painting below the monitor would have all of that painted anew.
        if self.app.screen is self or self.app.screen.is_modal:
            for pane in changed:
                pane.follow()

    def on_screen_resume(self) -> None:
        for pane in self.panes:
            pane.follow()

    def beat(self, news: bool) -> None:
        """Paint the charts that are due; the text has followed its events already."""
        for pace in self._paces:
            pace.beat(news)

    def redraw(self) -> None:
        """Everything that the live state shows in, now."""
        self.tell()
        self._redraw_strips()
        self._panel.redraw()

    def _redraw_strips(self) -> None:
        self._status.redraw()
        for pane in self.panes:
            if pane.display:
                pane.redraw()

    # Saving

    def save_now(self) -> None:
        """Once a second: what a reply has grown by, and drafts."""
        self._autosave.save(self.chat.store, self.sessions_open(), self.chat.model_name)

    @on(Pane.Edited)
    def draft_changed(self, event: Pane.Edited) -> None:
        self._autosave.edited(event.pane.conversation)

    @on(Prompt.Sent)
    async def sent(self, event: Prompt.Sent) -> None:
        pane = self._panes.holding(event.prompt)
        if pane.conversation.active:
            self.notify("Still writing. Esc stops the reply; your text stays here.")
            return
        await self.turns.resend(pane, event.text)

    # Actions

    def action_stop(self) -> None:
        pane = self.pane
        if pane.editing is not None:
            pane.end_edit()
        elif not self.stop() and self.chat.live.loading is not None:
            self.chat.engine.cancel_load()
        pane.prompt.focus()

    def stop(self) -> bool:
        """Stop the current pane's reply; whether there was one."""
        active = self.pane.conversation.active
        if active:
            self.chat.engine.cancel(active)
        return bool(active)

    async def action_new(self) -> None:
        await self.open(Conversation(system=self.chat.settings.system))

    async def action_close(self) -> None:
        pane = self.pane
        reply = pane.conversation.reply
        if self.stop() and reply is not None:
            # Nobody here will hear of its end any more.
            pane.conversation.abandon()
            self._autosave.finished(self.chat.store, reply)
        self.save_now()
        if len(self.panes) == 1:
            await self.open(Conversation(system=self.chat.settings.system))
        await pane.leave()
        self.show(max(0, self._panes.at - 1))

    def action_turn(self, step: int) -> None:
        self.show(self._panes.at + step)

    async def action_split(self) -> None:
        self._panes.split = not self._panes.split
        if self._panes.split and len(self.panes) == 1:
            await self.action_new()
        self.show(self._panes.at)

    def action_origin(self) -> None:
        self.chat.change(token_colours=not self.chat.settings.token_colours)
        for pane in self.panes:
            pane.show_origin(self.chat.settings.token_colours)

    def action_live(self) -> None:
        self.chat.change(live_panel=not self.chat.settings.live_panel)
        self.set_class(self.chat.settings.live_panel, "-live")
        self.call_after_refresh(self.redraw)

    async def action_regenerate(self) -> None:
        await self.turns.regenerate(self.pane, len(self.pane.conversation.messages) - 1)

    @on(MessageView.Asked)
    async def asked(self, event: MessageView.Asked) -> None:
        pane = self._panes.holding(event.view)
        conversation, message = pane.conversation, event.view.message
        if message not in conversation.messages:
            return
        position = next(i for i, m in enumerate(conversation.messages) if m is message)
        if event.action == "copy":
            self.chat.copy_text(message.text)
        elif event.action == "code":
            found = event.view.next_code()
            if found:
                code, number, total = found
                self.chat.copy_text(code, f"code block {number} of {total}")
        elif conversation.active:
            self.notify("Still writing. Esc stops the reply.")
        elif event.action == "edit":
            pane.begin_edit(position)
        elif event.action == "regenerate":
            await self.turns.regenerate(pane, position)

    def copy_reply(self, code: bool) -> None:
        view = self.pane.view_of_reply()
        if view is not None:
            view.action_do("code" if code else "copy")

    def sessions_open(self) -> Sequence[Conversation]:
        return [pane.conversation for pane in self.panes]

    async def forget_session(self, session: int) -> None:
        """A session was deleted: its pane goes, its reply stops."""
        for pane in self.panes:
            if pane.conversation.session == session:
                if pane.conversation.active:
                    self.chat.engine.cancel(pane.conversation.active)
                pane.conversation.session = None
                if len(self.panes) == 1:
                    await self.action_new()
                await pane.leave()
        self.show(min(self._panes.at, len(self.panes) - 1))
