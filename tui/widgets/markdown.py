"""Markdown that grows: cut into parts, of which only the last is laid out again.

``feed`` may be called for every token. What arrives is joined and shown a few times a second at
most, and less often where that is expensive: a reply slows its own display, not the generation.

Textual's own ``Markdown.get_stream`` is not used. For a reply of 1,400 words at 60 words a second
it took 0.11 of one core (and more the longer the reply), this widget 0.03: Textual 8.2, 120 x 40
cells. With a model that uses all cores the difference is taken from the generation.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from markdown_it import token as markdown
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Token
from pygments.util import ClassNotFound
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, HorizontalRule, ListItem, Markdown, MarkdownElement
from rich.padding import Padding
from rich.rule import Rule
from rich.segment import Segment
from rich.syntax import ANSISyntaxTheme, Syntax
from rich.text import Text
from textual.events import Click
from textual.strip import Strip

from .rich_theme import RichTheme, text_style
from .virtual_text import VirtualText

_SHARE = 0.2  # largest share of one core that the layout may take
_LOOK_SECONDS = 0.12  # seconds between two looks at what has arrived
_LONG = 4000  # characters of a paragraph or of code after which another part begins
_ROWS = 40  # lines of code that are laid out together while more of it is being written


@dataclass(frozen=True, slots=True)
class MarkdownPart:
    """A piece of Markdown that can be laid out by itself; ``number`` is that of a list item."""

    source: str
    kind: str  # the type of its token
    gap: bool = True  # whether an empty line stands before it
    number: int | None = None


class GrowingMarkdown(VirtualText[MarkdownPart]):
    """Shows ``feed``'s text as Markdown. ``settle`` waits until all of it is shown."""

    def __init__(self, text: str = "") -> None:
        super().__init__(classes="answer")
        self._pending = text
        self._tail = ""  # source of the last part, which may still be cut otherwise
        self._code: dict[str, list[Strip]] = {}  # lines of code being written, laid out before
        self._writer: asyncio.Task[None] | None = None
        self._take_some()  # for the first paint

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
            await asyncio.sleep(
                max(0.0 if self._pending else _LOOK_SECONDS, cost * (1 / _SHARE - 1))
            )

    def _take_some(self) -> None:
        piece, self._pending = self._pending[:_LONG], self._pending[_LONG:]
        self._tail += piece
        parts = _cut(self._tail, self.parts[-1] if self.parts else None)
        if parts:
            self._tail = parts[-1].source
            self.put(max(0, len(self.parts) - 1), parts)

    # Laying out

    def lay_out(self, part: MarkdownPart, width: int) -> list[Strip]:
        above = [Strip.blank(width)] if part.gap else []
        if part.kind != "fence" or len(part.source) < _LONG or part is not self.parts[-1]:
            return above + _lines(self.rich_theme, part.source, width, part.number)
        # Long code that may still grow: what was laid out before is kept. Once it is finished it
        # is laid out as a whole, because a comment may span several pieces.
        head, *rows = part.source.split("\n")
        found = above
        for at in range(0, len(rows), _ROWS):
            piece = "\n".join([head, *rows[at : at + _ROWS]])
            key = f"{width} {piece}"
            if key not in self._code:
                self._code[key] = _lines(self.rich_theme, piece, width)
            found += self._code[key]
        return found

    def joins(self, part: MarkdownPart) -> bool:
        return part.kind in ("paragraph_open", "heading_open", "item")

    def on_click(self, event: Click) -> None:
        if not (link := event.style.link):
            return
        event.stop()
        if link.startswith(("http://", "https://", "mailto:")):
            self.app.open_url(link)
        else:
            self.app.notify(f"Not a web address: {link}", markup=False)


def _cut(text: str, last: MarkdownPart | None) -> list[MarkdownPart]:
    """``text``, which begins with the source of the ``last`` part there is, as parts."""
    found = _parts(_parse(text))
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
        parts.append(MarkdownPart(whole.source[at:], whole.kind, gap=False))
    return parts


def _parts(tokens: Sequence[markdown.Token]) -> list[tuple[int, MarkdownPart]]:
    """The rows where parts begin: each block at the top level, and each item of a list there."""
    found: list[tuple[int, MarkdownPart]] = []
    number: int | None = None
    begun = False  # whether the list has had an item
    for token in tokens:
        if token.level == 1 and token.type == "list_item_open" and token.map:
            found.append((token.map[0], MarkdownPart("", "item", not begun, number)))
            number, begun = None if number is None else number + 1, True
        elif token.level == 0 and token.nesting >= 0 and token.map:
            if token.type in ("bullet_list_open", "ordered_list_open"):
                ordered = token.type == "ordered_list_open"
                number, begun = int(token.attrs.get("start", 1)) if ordered else None, False
            else:
                found.append((token.map[0], MarkdownPart("", token.type)))
    return found


# Kind of code: theme variable of its colour, the rest of its style.
_CODE = {
    Token.Comment: ("foreground-muted", "italic"),
    Token.Keyword: ("accent", ""),
    Token.Keyword.Constant: ("success", "bold"),
    Token.Literal.Number: ("warning", ""),
    Token.Literal.String: ("success", ""),
    Token.Literal.String.Doc: ("success", "italic"),
    Token.Name.Builtin: ("accent", ""),
    Token.Name.Class: ("primary", "bold"),
    Token.Name.Decorator: ("primary", "bold"),
    Token.Name.Function: ("primary", "bold"),
    Token.Name.Tag: ("primary", "bold"),
    Token.Operator.Word: ("accent", "bold"),
    Token.Generic.Deleted: ("error", ""),
    Token.Generic.Inserted: ("success", ""),
}


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    return MarkdownIt("gfm-like", {"html": False})


@lru_cache(maxsize=2)  # used twice: to cut the text into parts, and to lay out the last part
def _parse(source: str) -> tuple[markdown.Token, ...]:
    """The tokens of ``source``; they are shared and must not be changed."""
    return tuple(_parser().parse(source))


@lru_cache(maxsize=64)
def _lexer(name: str) -> Lexer | str:
    """Pygments' lexer for a language, as Rich asks for it; the name if there is none."""
    try:
        return get_lexer_by_name(name, stripnl=False, ensurenl=True, tabsize=4)
    except ClassNotFound:
        return name


@lru_cache(maxsize=2)
def _code_theme(rich_theme: RichTheme) -> ANSISyntaxTheme:
    return ANSISyntaxTheme(
        {kind: text_style(rich_theme.variables, *how) for kind, how in _CODE.items()}
    )


class _Code(CodeBlock):
    """Code on its own background, in the theme's colours; long lines are wrapped, not cut."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip("\n").expandtabs(4)
        # The theme is the page's, which Rich passes on.
        text = Syntax(code, _lexer(self.lexer_name), theme=self.theme).highlight(code)
        text.rstrip()
        text.no_wrap, text.overflow = False, "fold"
        yield Padding(text, (0, 1), style="code.background")


class _Rule(HorizontalRule):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Rule(style="markdown.hr", characters="─")


class _Item(ListItem):
    def render_number(
        self, console: Console, options: ConsoleOptions, number: int, last_number: int
    ) -> RenderResult:
        mark = f"{number}. ".rjust(len(str(last_number)) + 3)
        inner = options.update(width=max(1, options.max_width - len(mark)))
        for n, line in enumerate(console.render_lines(self.elements, inner, style=self.style)):
            yield Segment(" " * len(mark) if n else mark, console.get_style("markdown.item.number"))
            yield from line
            yield Segment.line()


class _Page(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "fence": _Code,
        "code_block": _Code,
        "hr": _Rule,
        "list_item_open": _Item,
    }

    def __init__(self, source: str, number: int | None, theme: Any) -> None:
        # Rich's own __init__ would build another parser each time.
        self.parsed = list(_parse(source))
        if number is not None and self.parsed and self.parsed[0].type == "ordered_list_open":
            first = self.parsed[0] = copy.copy(self.parsed[0])
            first.attrs = first.attrs | {"start": number}
        self.markup, self.style, self.justify, self.hyperlinks = source, "none", None, True
        self.code_theme = self.inline_code_theme = theme
        self.inline_code_lexer = None


def _lines(
    rich_theme: RichTheme, source: str, width: int, number: int | None = None
) -> list[Strip]:
    """Markdown as lines of ``width`` cells; what looks like HTML stays text.

    ``number`` is that of the first item, where ``source`` is part of an ordered list.
    """
    try:
        found = rich_theme.strips(_Page(source, number, _code_theme(rich_theme)), width)
    except Exception:  # nested deeper than Rich can lay out
        found = []
    seen = [n for n, line in enumerate(found) if line.text.strip()]
    if not seen:  # or there was no room for a letter: the text as it is
        return rich_theme.strips(Text(source.strip("\n"), overflow="fold"), width)
    return found[seen[0] : seen[-1] + 1]
