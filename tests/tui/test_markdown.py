"""Markdown that grows: nothing is lost, and only its last part is laid out again."""

from __future__ import annotations

import random

import pytest
from textual.geometry import Offset
from textual.selection import Selection

from tui.widgets.markdown import _LONG, GrowingMarkdown, MarkdownPart
from tui.widgets.pane import Transcript

TEXT = """\
# Head

A paragraph with **bold**, `code` and
a second line.

- one
- two
  - inside
3. three
4. four

```python
def f(x):
    return x
```

| a | b |
|---|---|
| 1 | 2 |

> quoted

Done: see [here](http://example.org).
"""


async def grown(chat, pieces: list[str]) -> tuple[list[MarkdownPart], str]:
    """The parts and the text on the screen after ``pieces`` were fed one by one."""
    async with chat() as c:
        body = GrowingMarkdown()
        await c.pane.query_one(Transcript).mount(body)
        for piece in pieces:
            body.feed(piece)
            body._take_some()  # a look at what has arrived, without the wait between two
        await body.settle()
        await c.pilot.pause()
        assert body.source == "".join(pieces)
        return body.parts, "\n".join(strip.text.rstrip() for strip in body._lines)


@pytest.mark.parametrize("seed", range(4))
async def test_text_reads_the_same_however_it_arrived(chat, seed: int) -> None:
    draw, rest, pieces = random.Random(seed), TEXT, []
    while rest:
        size = draw.randint(1, 9)
        pieces.append(rest[:size])
        rest = rest[size:]
    at_once = await grown(chat, [TEXT])
    assert await grown(chat, pieces) == at_once
    shown = at_once[1]
    for line in (" • one", " 3. three", " 4. four", " def f(x):", "▌ quoted", "Done: see here."):
        assert line in shown, line
    assert "```" not in shown and "**" not in shown and "|--" not in shown


@pytest.mark.parametrize("width", [0, 1, 2, 3, 5])
async def test_a_screen_without_room_is_survived(chat, width: int) -> None:
    async with chat() as c:
        body = GrowingMarkdown(TEXT)
        body.styles.width = width + 4  # its padding
        await c.pane.query_one(Transcript).mount(body)
        await c.pilot.pause()
        assert body.size.width == width


async def test_only_the_last_part_is_laid_out_again(chat, monkeypatch) -> None:
    laid: list[str] = []
    whole = GrowingMarkdown.lay_out
    monkeypatch.setattr(
        GrowingMarkdown,
        "lay_out",
        lambda s, part, w: (laid.append(part.source), whole(s, part, w))[1],
    )
    paragraphs = [f"paragraph {n}\n\n" for n in range(50)]
    await grown(chat, paragraphs)
    assert all(sum(p in source for source in laid) <= 3 for p in paragraphs)


@pytest.mark.parametrize("cut", [1000, 7000, 100_000])
async def test_a_line_of_any_length_is_shown_whole_in_parts(chat, cut: int) -> None:
    text = "".join(chr(97 + n % 26) for n in range(100_000))
    parts, shown = await grown(chat, [text[at : at + cut] for at in range(0, len(text), cut)])
    assert shown.replace("\n", "").replace(" ", "") == text
    assert max(len(part.source) for part in parts) <= _LONG


async def test_long_code_is_the_same_once_it_is_written(chat) -> None:
    code = "```python\n" + '"""\n' + "".join(f"x = {n}\n" for n in range(900)) + '"""\n```\n'
    pieces = [code[at : at + 997] for at in range(0, len(code), 997)]
    parts, shown = await grown(chat, [*pieces, "\nDone"])
    assert [part.kind for part in parts] == ["fence", "paragraph_open"]
    assert shown.count("x = ") == 900 and shown.endswith("Done")


async def test_settling_waits_for_text_fed_before_the_widget_was_up(chat) -> None:
    async with chat() as c:
        body = GrowingMarkdown("early")
        c.pane.query_one(Transcript).mount(body)
        await body.settle()
        assert body.source == "early"


async def test_a_selection_is_copied_without_the_breaks_of_the_screen(chat) -> None:
    async with chat(size=(80, 24)) as c:
        words = " ".join(f"word{n}" for n in range(40))
        body = GrowingMarkdown(f"{words}\n\n```\na\nb\n```")
        await c.pane.query_one(Transcript).mount(body)
        await c.pilot.pause()
        text, _ = body.get_selection(Selection(None, None)) or ("", "")
        assert text.split("\n")[0] == words
        assert [line.strip() for line in text.split("\n")[-2:]] == ["a", "b"]
        part = body.get_selection(Selection(Offset(4, 0), Offset(9, 0))) or ("", "")
        assert part[0] == words[4:9]


async def test_a_link_is_opened_where_it_is_one_for_a_browser(chat, monkeypatch) -> None:
    async with chat(size=(80, 24)) as c:
        opened: list[str] = []
        monkeypatch.setattr(c.app, "open_url", lambda url, **_: opened.append(url))
        body = GrowingMarkdown("[web](http://example.org) [file](ftp://example.org)")
        await c.pane.query_one(Transcript).mount(body)
        await c.pilot.pause()
        await c.pilot.click(body, offset=(3, 0))
        assert opened == ["http://example.org"]
        await c.pilot.click(body, offset=(7, 0))
        await c.until(lambda: c.told("Not a web address"))
        assert len(opened) == 1
