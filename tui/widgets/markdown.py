"""Markdown that grows: written in joined pieces, paced so that it never takes the machine.

``feed`` may be called for every token. Pieces are joined and written when the
last write is over and has been paid off: rendering gets at most a fifth of
one core, so a long reply slows its own display rather than the generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import lru_cache

from markdown_it import MarkdownIt
from textual.containers import Vertical
from textual.widgets import Markdown

_SHARE = 0.2  # of one core that rendering may take
_BEAT = 0.12  # seconds between two writes at least
_TOGETHER = 4  # pieces of a line too long that are laid out together
_LONG = 4000  # characters without a line end that make a paragraph of their own


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    # html=False: what looks like a tag is text, not something to be dropped.
    return MarkdownIt("gfm-like", {"html": False})


class Block(Markdown):
    """One piece of Markdown; opens only the links that a browser can take."""

    def __init__(self, text: str = "") -> None:
        super().__init__(text, parser_factory=_parser, open_links=False)

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        event.stop()
        if event.href.startswith(("http://", "https://", "mailto:")):
            self.app.open_url(event.href)
        else:
            self.app.notify(f"Not a web address: {event.href}", markup=False)


class GrowingMarkdown(Vertical):
    """Shows ``feed``'s text as Markdown. ``settle`` waits until all of it is on the screen."""

    DEFAULT_CSS = "GrowingMarkdown { height: auto; }"

    def __init__(self, text: str = "") -> None:
        super().__init__(classes="answer")
        self._pending = text
        self._line = 0  # characters in the line written last
        self._fenced = False
        self._writer: asyncio.Task[None] | None = None

    def on_mount(self) -> None:
        if self._pending:
            self._wake()

    def feed(self, text: str) -> None:
        self._pending += text
        if self.is_mounted:
            self._wake()

    def _wake(self) -> None:
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())

    async def settle(self) -> None:
        while self.is_attached:
            if self._writer is not None and not self._writer.done():
                await asyncio.shield(self._writer)
            elif self._pending:  # not mounted yet
                await asyncio.sleep(0.01)
            else:
                return

    async def _write(self) -> None:
        while self._pending and self.is_attached:
            started = time.thread_time()
            for _ in range(_TOGETHER):
                piece, self._pending = _split_long(self._pending, self._line)
                await self._write_piece(piece)
                if not self._pending:
                    break
            await self._painted()
            await self._rest(time.thread_time() - started)

    async def _write_piece(self, piece: str) -> None:
        full = self._line + len(piece) > _LONG and "\n" not in piece and not self._fenced
        if full or not self.query_children(Block):
            # Mounted empty: Markdown can only grow by what it parsed in append() itself.
            await self.mount(Block())
            self._line = 0
        await self.query_children(Block).last().append(piece)
        end = piece.rfind("\n")
        self._line = len(piece) - end - 1 if end >= 0 else self._line + len(piece)
        if piece.count("```") % 2:
            self._fenced = not self._fenced

    async def _rest(self, cost: float) -> None:
        """Pay off ``cost`` seconds of this thread's work; having waited costs nothing."""
        await asyncio.sleep(max(_BEAT, cost * (1 / _SHARE - 1)))

    async def _painted(self) -> None:
        """Wait until the screen was laid out again, the dearest part of a write."""
        done = asyncio.Event()
        self.call_after_refresh(done.set)
        with contextlib.suppress(TimeoutError):  # a hidden pane is never painted
            await asyncio.wait_for(done.wait(), 1.0)


def _split_long(text: str, before: int = 0) -> tuple[str, str]:
    """The part of ``text`` that may be written at once: up to where a line gets too long."""
    line = before
    for at in range(0, len(text), _LONG):
        end = text.rfind("\n", at, at + _LONG)
        line = (at + _LONG - end - 1) if end >= 0 else line + _LONG
        if line > 2 * _LONG:
            cut = at + _LONG
            return text[:cut], text[cut:]
    return text, ""
