"""Markdown as lines for a given width. Rich lays it out; what looks like HTML stays text."""

from __future__ import annotations

import copy
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
from textual.strip import Strip

from .inks import Inks, ink

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


@lru_cache(maxsize=2)  # asked for twice: to cut the text into parts, and to lay out the last
def parse(source: str) -> tuple[markdown.Token, ...]:
    """The tokens of ``source``, shared: to be read only."""
    return tuple(_parser().parse(source))


@lru_cache(maxsize=64)
def _lexer(name: str) -> Lexer | str:
    """Pygments' for a language as Rich asks for it; the name where there is none."""
    try:
        return get_lexer_by_name(name, stripnl=False, ensurenl=True, tabsize=4)
    except ClassNotFound:
        return name


@lru_cache(maxsize=2)
def _code_theme(inks: Inks) -> ANSISyntaxTheme:
    return ANSISyntaxTheme({kind: ink(inks.variables, *how) for kind, how in _CODE.items()})


class _Code(CodeBlock):
    """On a ground of its own, in the theme's colours; long lines are wrapped, not cut."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip("\n").expandtabs(4)
        # theme: the page's, passed on by Rich as it is.
        text = Syntax(code, _lexer(self.lexer_name), theme=self.theme).highlight(code)
        text.rstrip()
        text.no_wrap, text.overflow = False, "fold"
        yield Padding(text, (0, 1), style="code.ground")


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
        # Without Rich's own, which builds another parser each time.
        self.parsed = list(parse(source))
        if number is not None and self.parsed and self.parsed[0].type == "ordered_list_open":
            first = self.parsed[0] = copy.copy(self.parsed[0])
            first.attrs = first.attrs | {"start": number}
        self.markup, self.style, self.justify, self.hyperlinks = source, "none", None, True
        self.code_theme = self.inline_code_theme = theme
        self.inline_code_lexer = None


def lines(inks: Inks, source: str, width: int, number: int | None = None) -> list[Strip]:
    """``number`` is that of the first item where ``source`` is part of an ordered list."""
    try:
        found = inks.strips(_Page(source, number, _code_theme(inks)), width)
    except Exception:  # nested deeper than Rich can lay out
        found = []
    seen = [n for n, line in enumerate(found) if line.text.strip()]
    if not seen:  # nor was there room for a letter: the text as it is
        return inks.strips(Text(source.strip("\n"), overflow="fold"), width)
    return found[seen[0] : seen[-1] + 1]
