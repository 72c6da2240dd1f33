"""The open conversations: the messages, draft strip and input box of each, and which is seen."""

from __future__ import annotations

from collections.abc import Callable

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.dom import DOMNode
from textual.geometry import Size
from textual.widget import Widget
from textual.widgets import Static, TextArea

from dspark_mlx.stats import EngineStats

from ..canvas import Canvas
from ..charts import draft_strip
from ..conversation import Conversation
from .cached_lines import Background
from .chart import Chart
from .message_view import ClickLine, MessageView
from .prompt_box import PromptBox

_WELCOME = """\
Type below and press Enter.

Ctrl+T  colour tokens: drafted and accepted, or the target's own
Ctrl+G  monitor: every chart        Ctrl+L  charts beside the chat
Ctrl+N  another chat                Ctrl+O  earlier chats
Ctrl+P  every command               F5      models
F1      help                        Ctrl+Q  quit"""

_EDITING = "Editing: Enter sends and drops the later messages, Esc leaves all as it was"

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


class Pane(Vertical, Background):
    """Shows ``conversation``. ``history`` returns what was sent before, oldest first."""

    def __init__(
        self,
        conversation: Conversation,
        stats: EngineStats,
        origin: bool,
        history: Callable[[], list[str]],
    ) -> None:
        super().__init__()
        self.conversation = conversation
        self.leaving = False
        self.editing: int | None = None  # position of the message being edited
        self.prompt = PromptBox(history)
        self._stats = stats
        self._before_edit = ""
        self._origin = origin
        self._from = max(0, len(conversation.messages) - SHOWN)
        self._last_request: str | None = None
        self._transcript = Transcript()
        self._earlier = ClickLine(self, "show_earlier", "earlier")
        self._welcome = Static(_WELCOME, classes="welcome", markup=False)
        self._strip = Chart(self._draw_strip, classes="strip")
        self._editing_line = Static(_EDITING, classes="editing", markup=False)

    def compose(self) -> ComposeResult:
        with self._transcript:
            yield self._earlier
            yield self._welcome
        yield self._strip
        yield self._editing_line
        yield self.prompt

    async def on_mount(self) -> None:
        await self.sync()
        self.prompt.put(self.conversation.draft)

    def _update_labels(self) -> None:
        self._earlier.display = self._from > 0
        self._earlier.update(f"▴ {self._from} earlier messages")
        self._welcome.display = not self.conversation.messages
        self._editing_line.display = self.editing is not None

    async def leave(self) -> None:
        """Remove the pane. That takes a while, in which it must not be touched."""
        self.leaving = True
        await self.remove()

    @property
    def views(self) -> list[MessageView]:
        return [view for view in self._transcript.children if isinstance(view, MessageView)]

    def view_of_reply(self) -> MessageView | None:
        last = next(reversed(self._transcript.children), None)
        return last if isinstance(last, MessageView) and last.message.role == "assistant" else None

    # Following the conversation

    def _new_views(self, start: int, end: int | None = None) -> list[MessageView]:
        return [MessageView(m, self._origin) for m in self.conversation.messages[start:end]]

    async def sync(self) -> None:
        """Mount and remove views, so that they show the conversation's messages."""
        messages = self.conversation.messages
        self._from = min(self._from, len(messages))
        self._update_labels()
        wanted, views = messages[self._from :], self.views
        same = 0
        while same < min(len(views), len(wanted)) and views[same].message is wanted[same]:
            same += 1
        for view in views[same:]:
            await view.leave()
        await self._transcript.mount_all(self._new_views(self._from + same))

    def follow(self) -> None:
        """Show what is new of the reply."""
        view = self.view_of_reply()
        if view is not None:
            view.refresh_message(self.conversation.waiting)

    def to_end(self) -> None:
        self._transcript.follow()

    def show_origin(self, on: bool) -> None:
        self._origin = on
        for view in self.views:
            view.show_origin(on)

    async def action_show_earlier(self) -> None:
        start, views = max(0, self._from - SHOWN), self.views
        earlier = self._new_views(start, self._from)
        await self._transcript.mount_all(earlier, before=views[0] if views else None)
        self._from = start
        self._update_labels()
        if views:
            views[0].scroll_visible(animate=False, top=True)

    @on(PromptBox.Paged)
    def page(self, event: PromptBox.Paged) -> None:
        event.stop()
        if event.step < 0:
            self._transcript.scroll_page_up(animate=False)
        else:
            self._transcript.scroll_page_down(animate=False)

    # The draft strip

    def _draw_strip(self, width: int, height: int) -> Canvas:
        self._last_request = self.conversation.active or self._last_request
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
        if self.editing is None:
            self.conversation.draft = self.prompt.text


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
