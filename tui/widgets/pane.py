"""The open conversations: the messages, draft strip and input box of each, and which is seen."""

from __future__ import annotations

from collections.abc import Callable

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.dom import DOMNode
from textual.events import Click
from textual.geometry import Size
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Static, TextArea

from dspark_mlx.stats import EngineStats

from ..canvas import Canvas
from ..charts import draft_strip
from ..conversation import Conversation
from .cached_lines import Background
from .chart import Chart
from .message_view import MessageView
from .prompt_box import PromptBox

_WELCOME = """\
Type below and press Enter.

Ctrl+T  colour tokens: drafted and accepted, or the target's own
Ctrl+G  monitor: every chart        Ctrl+L  charts beside the chat
Ctrl+N  another chat                Ctrl+O  earlier chats
Ctrl+P  every command               F5      models
F1      help                        Ctrl+Q  quit"""

SHOWN = 24  # messages put on the screen at once; older ones on demand


class Transcript(VerticalScroll, Background, can_focus=False):
    """Stays at the end while text arrives, until the reader scrolls away.

    Textual's own anchor pushes short conversations to the bottom of the screen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.following = True

    def follow(self) -> None:
        """Go to the end and stay there."""
        self.following = True
        self.scroll_end(animate=False)

    def watch_scroll_y(self, old: float, new: float) -> None:
        super().watch_scroll_y(old, new)
        self.following = self.scroll_target_y >= self.max_scroll_y

    def watch_virtual_size(self, _size: Size) -> None:
        if self.following:
            # force: where text no longer fits for the first time there is no scroll bar yet.
            self.scroll_end(animate=False, immediate=True, force=True)

    def on_resize(self) -> None:
        self.call_after_refresh(self._stay)

    def _stay(self) -> None:
        if self.following:  # asked now: the reader may have scrolled since the resize
            self.scroll_end(animate=False, immediate=True)


class Earlier(Static):
    """Stands for the messages not on the screen yet."""

    class Wanted(Message):
        pass

    def on_click(self, event: Click) -> None:
        event.stop()
        self.post_message(self.Wanted())


class Pane(Vertical, Background):
    """Shows ``conversation``. ``history`` returns what was sent before, oldest first."""

    class Edited(Message):
        """The draft in the input box changed."""

        def __init__(self, pane: Pane) -> None:
            super().__init__()
            self.pane = pane

    def __init__(
        self,
        conversation: Conversation,
        stats: EngineStats,
        origin: bool,
        history: Callable[[], list[str]],
    ) -> None:
        super().__init__()
        self.conversation = conversation
        self._stats = stats
        self.leaving = False
        self.editing: int | None = None  # position of the message being edited
        self._before_edit = ""
        self._origin = origin
        self._history = history
        self._from = max(0, len(conversation.messages) - SHOWN)
        self._last_request: str | None = None
        self._strip = Chart(self._draw_strip, classes="strip")

    def compose(self) -> ComposeResult:
        with Transcript():
            yield Earlier("", markup=False)
            yield Static(_WELCOME, classes="welcome", markup=False)
        yield self._strip
        yield Static("", classes="editing", markup=False)
        yield PromptBox(self._history)

    async def on_mount(self) -> None:
        transcript = self.query_one(Transcript)
        self._update_labels()
        await transcript.mount_all(
            MessageView(m, self._origin) for m in self.conversation.messages[self._from :]
        )
        prompt = self.query_one(PromptBox)
        prompt.put(self.conversation.draft)

    def _update_labels(self) -> None:
        earlier = self.query_one(Earlier)
        earlier.display = self._from > 0
        earlier.update(f"▴ {self._from} earlier messages")
        self.query_one(".welcome").display = not self.conversation.messages
        editing = self.query_one(".editing", Static)
        editing.display = self.editing is not None
        editing.update("Editing: Enter sends and drops what came after, Esc leaves it as it was")

    async def leave(self) -> None:
        """Remove the pane. That takes a while, in which it must not be touched."""
        self.leaving = True
        await self.remove()

    @property
    def prompt(self) -> PromptBox:
        return self.query_one(PromptBox)

    @property
    def views(self) -> list[MessageView]:
        return [
            child for child in self.query_one(Transcript).children if isinstance(child, MessageView)
        ]

    def view_of_reply(self) -> MessageView | None:
        children = self.query_one(Transcript).children
        last = children[-1] if children else None
        return last if isinstance(last, MessageView) and last.message.role == "assistant" else None

    # Following the conversation

    async def sync(self) -> None:
        """Mount and remove views, so that they show the conversation's messages."""
        messages = self.conversation.messages
        self._from = min(self._from, len(messages))
        wanted = messages[self._from :]
        views = self.views
        same = 0
        while same < min(len(views), len(wanted)) and views[same].message is wanted[same]:
            same += 1
        for view in views[same:]:
            await view.leave()
        if wanted[same:]:
            await self.query_one(Transcript).mount_all(
                MessageView(message, self._origin) for message in wanted[same:]
            )
        self._update_labels()

    def follow(self) -> None:
        """The reply changed: show what is new of it."""
        view = self.view_of_reply()
        if view is not None:
            view.refresh_message(self.conversation.waiting)

    def to_end(self) -> None:
        self.query_one(Transcript).follow()

    def show_origin(self, on: bool) -> None:
        self._origin = on
        for view in self.views:
            view.show_origin(on)

    @on(Earlier.Wanted)
    async def show_earlier(self) -> None:
        start = max(0, self._from - SHOWN)
        views = self.views
        fresh = [
            MessageView(message, self._origin)
            for message in self.conversation.messages[start : self._from]
        ]
        transcript = self.query_one(Transcript)
        await transcript.mount_all(fresh, before=views[0] if views else None)
        self._from = start
        self._update_labels()
        if views:
            views[0].scroll_visible(animate=False, top=True)

    @on(PromptBox.Paged)
    def page(self, event: PromptBox.Paged) -> None:
        event.stop()
        transcript = self.query_one(Transcript)
        if event.step < 0:
            transcript.scroll_page_up(animate=False)
        else:
            transcript.scroll_page_down(animate=False)

    # The draft strip

    def _draw_strip(self, width: int, height: int) -> Canvas:
        if self.conversation.active:
            self._last_request = self.conversation.active
        request = self._stats.requests.get(self._last_request or "")
        return draft_strip.draw(request, width, height)

    def redraw(self) -> None:
        self._strip.redraw()

    # Editing an earlier message

    def begin_edit(self, position: int) -> None:
        if self.editing is None:
            self._before_edit = self.prompt.text
        self.editing = position
        self.prompt.put(self.conversation.messages[position].text)
        self.prompt.focus()
        self._update_labels()

    def end_edit(self) -> None:
        """Leave editing; the draft from before comes back."""
        if self.editing is not None:
            self.editing = None
            self.prompt.put(self._before_edit)
            self._update_labels()

    @on(TextArea.Changed)
    def keep_draft(self, event: TextArea.Changed) -> None:
        event.stop()
        if self.editing is None and self.conversation.draft != self.prompt.text:
            self.conversation.draft = self.prompt.text
            self.post_message(self.Edited(self))


class Panes(Horizontal, Background):
    """One pane for each conversation, of which one is seen, or two side by side.

    Once the screen is up there is always at least one. The input box of the current pane gets the
    focus whenever another pane is shown.
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
        """Panes with neither a message nor a draft, which need no tab beside a real chat."""
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
        """Make the focused of two panes the current one; returns whether that changed it."""
        if focused is None:
            return False
        for index, pane in enumerate(self.all):
            if pane in focused.ancestors and index != self.at:
                self.at = index
                return True
        return False
