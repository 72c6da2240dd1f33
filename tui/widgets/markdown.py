"""Markdown that grows: cut into parts that are laid out once, only the last one again.

``feed`` may be called for every token. What arrives is joined and shown a few
times a second at most, less often where that is dear, so that a reply slows its
own display rather than the generation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from markdown_it.token import Token
from textual.events import Click
from textual.strip import Strip

from .page import lines, parse
from .sheet import Sheet

_SHARE = 0.2  # of one core that laying out may take
_BEAT = 0.12  # seconds between two looks at what has arrived
_LONG = 4000  # characters of a paragraph or of code after which another part begins
_ROWS = 40  # lines of code that are laid out together while more of it is being written


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of Markdown that stands by itself. ``number``: of an item in an ordered list."""

    source: str
    kind: str  # the type of its token
    gap: bool = True  # whether an empty line stands before it
    number: int | None = None


class GrowingMarkdown(Sheet[Part]):
    """Shows ``feed``'s text as Markdown. ``settle`` waits until all of it is shown."""

    def __init__(self, text: str = "") -> None:
        super().__init__(classes="answer")
        self._pending = text
        self._tail = ""  # what was cut into the last part, and may be cut otherwise yet
        self._code: dict[str, list[Strip]] = {}  # lines of code being written, laid out before
        self._writer: asyncio.Task[None] | None = None
        self._take_some()  # so that there is something at the first paint

    @property
    def source(self) -> str:
        """What is shown, as it was fed."""
        return "".join(part.source for part in self.parts)

    def on_mount(self) -> None:
        self._wake()

    def feed(self, text: str) -> None:
        self._pending += text
        if self.is_mounted:
            self._wake()

    def _wake(self) -> None:
        if self._pending and (self._writer is None or self._writer.done()):
            self._writer = asyncio.create_task(self._write())

    async def settle(self) -> None:
        while self.is_attached and self._pending:
            await asyncio.sleep(0.01)

    async def _write(self) -> None:
        while self._pending and self.is_attached:
            started = time.thread_time()
            self._take_some()
            cost = time.thread_time() - started
            await asyncio.sleep(max(0.0 if self._pending else _BEAT, cost * (1 / _SHARE - 1)))

    def _take_some(self) -> None:
        piece, self._pending = self._pending[:_LONG], self._pending[_LONG:]
        self._tail += piece
        parts = _cut(self._tail, self.parts[-1] if self.parts else None)
        if parts:
            self._tail = parts[-1].source
            self.put(max(0, len(self.parts) - 1), parts)

    # Laying out

    def lay(self, part: Part, width: int) -> list[Strip]:
        above = [Strip.blank(width)] if part.gap else []
        if part.kind != "fence" or len(part.source) < _LONG or part is not self.parts[-1]:
            return above + lines(self.inks, part.source, width, part.number)
        # Code that is long and may still grow: what was laid out before is kept. Once it is
        # written it is laid out in one piece, as a comment may reach over several.
        head, *rows = part.source.split("\n")
        found = above
        for at in range(0, len(rows), _ROWS):
            piece = "\n".join([head, *rows[at : at + _ROWS]])
            key = f"{width} {piece}"
            if key not in self._code:
                self._code[key] = lines(self.inks, piece, width)
            found += self._code[key]
        return found

    def joins(self, part: Part) -> bool:
        return part.kind in ("paragraph_open", "heading_open", "item")

    def on_click(self, event: Click) -> None:
        if not (link := event.style.link):
            return
        event.stop()
        if link.startswith(("http://", "https://", "mailto:")):
            self.app.open_url(link)
        else:
            self.app.notify(f"Not a web address: {link}", markup=False)


def _cut(text: str, last: Part | None) -> list[Part]:
    """``text``, which begins with the source of the ``last`` part there is, as parts."""
    found = _parts(parse(text))
    if not found:
        return []
    rows = text.splitlines(keepends=True)
    first = found[0][1]
    found[0] = (
        0,
        replace(first, gap=False)
        if last is None
        else replace(first, gap=last.gap, number=last.number),
    )
    ends = [row for row, _ in found[1:]] + [len(rows)]
    parts = [
        replace(part, source="".join(rows[row:end]))
        for (row, part), end in zip(found, ends, strict=True)
    ]
    while parts[-1].kind == "paragraph_open" and len(parts[-1].source) > _LONG:
        whole = parts.pop()
        at = max(whole.source.rfind(mark, 0, _LONG) for mark in " \n") + 1 or _LONG
        parts.append(replace(whole, source=whole.source[:at]))
        parts.append(Part(whole.source[at:], whole.kind, gap=False))
    return parts


def _parts(tokens: Sequence[Token]) -> list[tuple[int, Part]]:
    """Where parts begin: what is at the top, and each item of a list there."""
    found: list[tuple[int, Part]] = []
    number: int | None = None
    begun = False  # whether the list has an item already
    for token in tokens:
        if token.level == 1 and token.type == "list_item_open" and token.map:
            found.append((token.map[0], Part("", "item", not begun, number)))
            number, begun = None if number is None else number + 1, True
        elif token.level == 0 and token.nesting >= 0 and token.map:
            if token.type in ("bullet_list_open", "ordered_list_open"):
                ordered = token.type == "ordered_list_open"
                number, begun = int(token.attrs.get("start", 1)) if ordered else None, False
            else:
                found.append((token.map[0], Part("", token.type)))
    return found
