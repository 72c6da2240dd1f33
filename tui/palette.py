"""The command palette: everything the chat can do, by name."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from functools import partial
from typing import Any

from textual.command import DiscoveryHit, Hit, Hits, Provider

# Title, explanation, action.
_COMMANDS = (
    ("New chat", "Ctrl+N", "screen.new"),
    ("Chats: open, search, delete, export", "Ctrl+O", "screen.sessions"),
    ("Side by side", "F6: two chats at once", "screen.split"),
    ("Next chat", "F8", "screen.turn(1)"),
    ("Previous chat", "F7", "screen.turn(-1)"),
    ("Close chat", "F9; it stays among the saved ones", "screen.close"),
    ("Stop the reply", "Esc", "screen.stop"),
    ("Write the reply again", "Ctrl+R", "screen.regenerate"),
    ("Copy the reply", "C on a message", "screen.copy_reply"),
    ("Copy code", "the next code block of the reply", "screen.copy_reply(True)"),
    ("Rename chat", "title of this chat", "screen.rename"),
    ("System prompt", "of this chat", "screen.system_prompt"),
    ("Export as Markdown", "this chat", "screen.export('md')"),
    ("Export as JSON", "this chat", "screen.export('json')"),
    ("Colour tokens", "Ctrl+T: by origin", "screen.origin"),
    ("Live panel", "Ctrl+L: charts beside the chat", "screen.live"),
    ("Monitor", "Ctrl+G: every chart", "app.monitor"),
    ("Models", "F5: choose, download, load", "app.models"),
    ("Settings", "Ctrl+S", "app.settings"),
)
_LAST = (
    ("Help", "F1: keys, and how to read the live view", "app.help"),
    ("Quit", "Ctrl+Q", "app.quit"),
)


class ChatCommands(Provider):
    def commands(self) -> Iterator[tuple[str, str, str]]:
        """``(title, explanation, action)`` of each command."""
        yield from _COMMANDS
        for name in sorted(self.app.available_themes):
            yield f"Theme: {name}", "colours", f"app.set_theme({name!r})"
        if self.app.check_action("replay", ()):
            for what in ("pause", "faster", "slower", "restart"):
                yield f"Recording: {what}", "replay", f"app.replay({what!r})"
        yield from _LAST

    def _run(self, action: str) -> partial[Coroutine[Any, Any, bool]]:
        # The chat is the app's lowest screen.
        return partial(self.app.run_action, action, self.app.screen_stack[0])

    async def discover(self) -> Hits:
        for title, explanation, action in self.commands():
            yield DiscoveryHit(title, self._run(action), help=explanation)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for title, explanation, action in self.commands():
            if (score := matcher.match(title)) > 0:
                yield Hit(score, matcher.highlight(title), self._run(action), help=explanation)
