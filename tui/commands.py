"""The command palette: everything the chat can do, by name."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from textual.app import SystemCommand
from textual.command import DiscoveryHit, Hit, Hits, Provider

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .app import ChatApp


class ChatCommands(Provider):
    @property
    def chat(self) -> ChatApp:
        return cast("ChatApp", self.app)

    def _commands(self) -> Iterator[SystemCommand]:
        app, screen = self.chat, self.chat.chat

        def act(action: str) -> Callable[[], Any]:
            return partial(app.run_action, action, screen)

        yield SystemCommand("New chat", "Ctrl+N", act("screen.new"))
        yield SystemCommand("Chats: open, search, delete, export", "Ctrl+O", act("app.sessions"))
        yield SystemCommand("Side by side", "F6: two chats at once", act("screen.split"))
        yield SystemCommand("Next chat", "F8", act("screen.turn(1)"))
        yield SystemCommand("Previous chat", "F7", act("screen.turn(-1)"))
        yield SystemCommand("Close chat", "F9; it stays among the saved ones", act("screen.close"))
        yield SystemCommand("Stop the reply", "Esc", act("screen.stop"))
        yield SystemCommand("Write the reply again", "Ctrl+R", act("screen.regenerate"))
        yield SystemCommand("Copy the reply", "C on a message", partial(screen.copy_reply, False))
        yield SystemCommand(
            "Copy code", "the next code block of the reply", partial(screen.copy_reply, True)
        )
        yield SystemCommand("Rename chat", "title of this chat", act("app.rename"))
        yield SystemCommand("System prompt", "of this chat", act("app.system_prompt"))
        yield SystemCommand("Export as Markdown", "this chat", act("app.export('md')"))
        yield SystemCommand("Export as JSON", "this chat", act("app.export('json')"))
        yield SystemCommand("Colour tokens", "Ctrl+T: by origin", act("screen.origin"))
        yield SystemCommand("Live panel", "Ctrl+L: charts beside the chat", act("screen.live"))
        yield SystemCommand("Monitor", "Ctrl+G: every chart", act("app.monitor"))
        yield SystemCommand("Models", "F5: choose, download, load", act("app.models"))
        yield SystemCommand("Settings", "Ctrl+S", act("app.settings"))
        for name in sorted(app.available_themes):
            yield SystemCommand(f"Theme: {name}", "colours", partial(app.change, theme=name))
        if app.replaying:
            for what in ("pause", "faster", "slower", "restart"):
                yield SystemCommand(
                    f"Recording: {what}", "replay", partial(app.action_replay, what)
                )
        yield SystemCommand("Help", "F1: keys, and how to read the live view", act("app.help"))
        yield SystemCommand("Quit", "Ctrl+Q", act("app.quit"))

    async def discover(self) -> Hits:
        for title, help_text, callback, *_ in self._commands():
            yield DiscoveryHit(title, callback, help=help_text)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for title, help_text, callback, *_ in self._commands():
            if (score := matcher.match(title)) > 0:
                yield Hit(score, matcher.highlight(title), callback, help=help_text)
