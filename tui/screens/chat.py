"""The main screen: open conversations, what they ask of the engine, and what comes back."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import Footer

from dspark_mlx.errors import DsparkError
from dspark_mlx.events import Event, Finished, Queued, StepDone

from .. import charts
from ..conversation import Conversation, Message
from ..text import one_line, size
from ..widgets.bars import Tab, TabBar
from ..widgets.chart import Chart
from ..widgets.live import LivePanel
from ..widgets.message import MessageView
from ..widgets.pane import Pane
from ..widgets.prompt import Prompt

if TYPE_CHECKING:
    from ..app import ChatApp

_WELCOME = """\
Type below and press Enter.

Ctrl+T  colour tokens: drafted and accepted, or the target's own
Ctrl+G  monitor: every chart        Ctrl+L  charts beside the chat
Ctrl+N  another chat                Ctrl+O  earlier chats
F5      models                      Ctrl+P  every command          F1  help"""


class ChatScreen(Screen[None]):
    BINDINGS: ClassVar = [
        Binding("escape", "stop", "Stop", id="chat.stop"),
        Binding("ctrl+t", "origin", "Tokens", id="chat.tokens", priority=True),
        Binding("ctrl+l", "live", "Live", id="chat.live", show=False, priority=True),
        Binding("ctrl+g", "app.monitor", "Monitor", id="chat.monitor", priority=True),
        Binding("ctrl+n", "new", "New", id="chat.new", show=False, priority=True),
        Binding("ctrl+o", "app.sessions", "Chats", id="chat.sessions", priority=True),
        Binding("f1", "app.help", "Help", id="chat.help"),
        Binding(
            "ctrl+r", "regenerate", "Write again", id="chat.regenerate", show=False, priority=True
        ),
        Binding("f5", "app.models", "Models", id="chat.models", show=False),
        Binding(
            "ctrl+s", "app.settings", "Settings", id="chat.settings", show=False, priority=True
        ),
        Binding("f6", "split", "Side by side", id="chat.split", show=False, priority=True),
        Binding(
            "f7,ctrl+pageup",
            "turn(-1)",
            "Previous chat",
            id="chat.previous",
            show=False,
            priority=True,
        ),
        Binding(
            "f8,ctrl+pagedown", "turn(1)", "Next chat", id="chat.next", show=False, priority=True
        ),
        Binding("f9", "close", "Close chat", id="chat.close", show=False),
    ]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (112, "-wide"), (170, "-huge")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (22, "-medium"), (34, "-tall")]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self._tabs = TabBar()
        self._box = Horizontal(id="panes")
        self._current = 0
        self._split = False
        self._dirty: set[int] = set()  # ids of conversations with an unsaved draft
        self._saved: dict[int, int] = {}  # message row: characters on disk

    @property
    def chat(self) -> ChatApp:
        return cast("ChatApp", self.app)

    def compose(self) -> ComposeResult:
        # Kept at hand: they are wanted many times a second, and a query walks every widget.
        live = self.chat.live
        yield self._tabs
        with Horizontal(id="body"):
            yield self._box
            self._panel = LivePanel(live)
            yield self._panel
        self._status = Chart(lambda w, h: charts.status_line(live, w, h), classes="status")
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
        return [child for child in self._box.children if isinstance(child, Pane)]

    @property
    def pane(self) -> Pane:
        panes = self.panes
        return panes[min(self._current, len(panes) - 1)]

    async def open(self, conversation: Conversation) -> Pane:
        """Show a conversation in a new pane, or the pane that has it already."""
        for index, pane in enumerate(self.panes):
            same = conversation.session is not None
            if same and pane.conversation.session == conversation.session:
                self.show(index)
                return pane
        app = self.chat
        pane = Pane(conversation, app.live, app.settings.token_colours, _WELCOME, app.inputs)
        empty = [p for p in self.panes if not p.conversation.messages and not p.prompt.text.strip()]
        await self._box.mount(pane)
        if conversation.messages or conversation.draft:
            for old in empty:  # a chat never begun is not worth a tab
                await old.remove()
        self.show(self.panes.index(pane))
        return pane

    def show(self, index: int) -> None:
        panes = self.panes
        self._current = index % len(panes)
        other = (self._current + 1) % len(panes)
        visible = {self._current, other} if self._split and len(panes) > 1 else {self._current}
        for number, pane in enumerate(panes):
            pane.display = number in visible
        # The one typed into may be either; focus follows the tab.
        self.pane.prompt.focus()
        self.tell()

    @on(TabBar.Chosen)
    def chosen(self, event: TabBar.Chosen) -> None:
        self.show(event.index)

    def on_descendant_focus(self) -> None:
        """With two panes side by side the focused one is the current one."""
        if self.focused is None:
            return
        for index, pane in enumerate(self.panes):
            if pane in self.focused.ancestors and index != self._current:
                self._current = index
                self.tell()

    def tell(self) -> None:
        """Bring the top row up to date."""
        if not self.is_mounted:
            return
        tabs = tuple(
            Tab(pane.conversation.name, index == self._current, bool(pane.conversation.active))
            for index, pane in enumerate(self.panes)
        )
        self._tabs.show(tabs, self.engine_note())

    def engine_note(self) -> str:
        live = self.chat.live
        if live.loading is not None:
            step = live.loading
            words = {
                "download": "fetching",
                "convert": "converting",
                "load": "loading",
                "check": "checking",
                "profile": "measuring the device",
            }
            note = f"{words.get(step.stage, step.stage)} {step.detail}".strip()
            if step.total:
                note += f" {100 * step.done / step.total:.0f}%"
                if step.stage == "download":
                    note += f" of {size(step.total)}"
            return note + " (Esc cancels)"
        if live.failure is not None:
            return f"✗ {one_line(live.failure.message, 80)}"
        if live.loaded is not None:
            return (
                f"{one_line(live.loaded.model, 40)} · {live.loaded.method} · {live.loaded.schedule}"
            )
        return "starting" if self.chat.wanted_model else "no model (F5)"

    # Events of the engine

    async def take(self, events: Iterable[Event]) -> None:
        """Route events to the conversations whose requests they are about."""
        changed: set[Pane] = set()
        panes = self.panes
        for event in events:
            if self.chat.replaying and isinstance(event, Queued | StepDone):
                panes = await self._adopt(event, panes)
            for pane in panes:
                conversation = pane.conversation
                reply = conversation.reply
                if conversation.apply(event):
                    changed.add(pane)
                    if isinstance(event, Finished) and reply is not None:
                        self._write(reply)
        for pane in changed:
            pane.follow()

    async def _adopt(self, event: Queued | StepDone, panes: list[Pane]) -> list[Pane]:
        """A recording plays requests nobody typed here: give each a conversation."""
        names = (
            [event.request_id]
            if isinstance(event, Queued)
            else [row.request_id for row in event.rows]
        )
        for name in names:
            if not name.startswith("recorded-") or any(
                pane.conversation.active == name for pane in panes
            ):
                continue
            title = name.rpartition("-")[2]
            conversation = Conversation(title=f"recording {title}")
            conversation.ask(f"(recorded request {title})")
            conversation.open_reply(name)
            await self.open(conversation)
            panes = self.panes
        return panes

    def redraw(self, beat: int = 0) -> None:
        """The charts that are on the screen, after new events.

        The eye reads text faster than charts: text follows every beat, the
        strip every second and the panel every third one.
        """
        self.tell()
        if beat % 2 == 0:
            self._status.redraw()
            for pane in self.panes:
                if pane.display:
                    pane.redraw()
        if beat % 3 == 0 and self._panel.display:
            self._panel.redraw()

    # Saving

    def _write(self, message: Message) -> None:
        self._saved.pop(message.row or 0, None)
        self.chat.store.later(self.chat.store.update, message)

    def save_now(self) -> None:
        """Once a second: what a reply has grown by, and drafts."""
        store = self.chat.store
        for pane in self.panes:
            conversation = pane.conversation
            reply = conversation.reply
            row = reply.row if reply is not None and reply.streaming else None
            if reply is not None and row and len(reply.text) != self._saved.get(row, 0):
                self._saved[row] = len(reply.text)
                store.later(store.update_text, row, reply.text)
            if id(conversation) in self._dirty:
                if conversation.session is not None:
                    store.later(store.save_draft, conversation.session, conversation.draft)
                elif conversation.draft.strip():
                    store.save(conversation, self.chat.model_name)
        self._dirty.clear()

    @on(Pane.Edited)
    def draft_changed(self, event: Pane.Edited) -> None:
        self._dirty.add(id(event.pane.conversation))

    # Asking

    @on(Prompt.Sent)
    async def sent(self, event: Prompt.Sent) -> None:
        pane = next(pane for pane in self.panes if pane in event.prompt.ancestors)
        if pane.conversation.active:
            self.notify("Still writing. Esc stops the reply; your text stays here.")
            return
        if pane.editing is not None:
            position = pane.editing
            pane.editing = None
            self._forget(pane.conversation, position)
        pane.prompt.put("")
        await self.ask(pane, event.text)

    async def ask(self, pane: Pane, text: str) -> None:
        conversation = pane.conversation
        conversation.ask(text)
        conversation.draft = ""
        self.chat.inputs.append(text)
        await self.generate(pane)

    async def generate(self, pane: Pane) -> None:
        """Save, then submit: the turn is on disk before anything is generated."""
        conversation, app = pane.conversation, self.chat
        try:
            request = conversation.request(f"c{secrets.token_hex(4)}", app.settings)
        except DsparkError as error:
            self.notify(str(error), severity="error", markup=False)
            await pane.sync()
            return
        app.save(conversation)
        await pane.sync()
        pane.to_end()
        pane.follow()
        app.submit(request)
        self.tell()

    def _forget(self, conversation: Conversation, position: int) -> None:
        dropped = conversation.truncate(position)
        self.chat.store.forget(dropped)

    # Actions

    def action_stop(self) -> None:
        pane = self.pane
        if pane.editing is not None:
            pane.end_edit()
        elif not self.stop() and self.chat.live.loading is not None:
            self.chat.cancel_load()
        pane.prompt.focus()

    def stop(self) -> bool:
        """Stop the current pane's reply; whether there was one."""
        active = self.pane.conversation.active
        if active:
            self.chat.backend.cancel(active)
        return bool(active)

    async def action_new(self) -> None:
        await self.open(Conversation(system=self.chat.settings.system))

    async def action_close(self) -> None:
        pane = self.pane
        self.stop()
        self.save_now()
        if len(self.panes) == 1:
            await self.open(Conversation(system=self.chat.settings.system))
        await pane.remove()
        self.show(max(0, self._current - 1))

    def action_turn(self, step: int) -> None:
        self.show(self._current + step)

    async def action_split(self) -> None:
        self._split = not self._split
        if self._split and len(self.panes) == 1:
            await self.action_new()
        self.show(self._current)

    def action_origin(self) -> None:
        self.chat.change(token_colours=not self.chat.settings.token_colours)
        for pane in self.panes:
            pane.show_origin(self.chat.settings.token_colours)

    def action_live(self) -> None:
        self.chat.change(live_panel=not self.chat.settings.live_panel)
        self.set_class(self.chat.settings.live_panel, "-live")
        self.call_after_refresh(self.redraw)

    async def action_regenerate(self) -> None:
        await self.regenerate(self.pane, len(self.pane.conversation.messages) - 1)

    async def regenerate(self, pane: Pane, position: int) -> None:
        conversation = pane.conversation
        if conversation.active or position < 0:
            return
        if conversation.messages[position].role == "assistant":
            self._forget(conversation, position)
        if conversation.messages:
            await self.generate(pane)

    @on(MessageView.Asked)
    async def asked(self, event: MessageView.Asked) -> None:
        pane = next(pane for pane in self.panes if pane in event.view.ancestors)
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
            await self.regenerate(pane, position)

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
                    self.chat.backend.cancel(pane.conversation.active)
                pane.conversation.session = None
                if len(self.panes) == 1:
                    await self.action_new()
                await pane.remove()
        self.show(min(self._current, len(self.panes) - 1))
