"""What is painted, and how often: as Textual would, with less work."""

from __future__ import annotations

import random

import pytest
from scripted import ScriptedEngine
from textual._compositor import Compositor
from textual.geometry import Region

from tui.textual_patches.compositor import SparingCompositor
from tui.widgets.cached_lines import Background
from tui.widgets.markdown import GrowingMarkdown
from tui.widgets.pane import Transcript

TEXT = "A **word**.\n\n```python\nx = 1\n```\n\n1. one\n2. two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"


def painted(compositor: Compositor, crop: Region) -> list[list[tuple[int, object]]]:
    """What a paint of ``crop`` sends to the terminal: for each row where it starts and what."""
    chops = compositor._render_chops(crop, crop.line_range.__contains__)
    ends = [cuts[1:] for cuts in compositor.cuts]
    return [
        [
            (x, list(strip) if strip else None)
            for (x, strip), end in zip(chops[y].items(), ends[y], strict=True)
            if x < crop.right and end > crop.x
        ]
        for y in crop.line_range
    ]


@pytest.mark.parametrize("size", [(80, 24), (130, 40)])
async def test_a_paint_is_what_textual_would_paint(chat, monkeypatch, size) -> None:
    async with chat(ScriptedEngine([TEXT * 4, TEXT]), size=size) as c:
        await c.say("One")
        await c.say("Two")
        compositor = c.app.chat._compositor
        assert type(compositor) is SparingCompositor
        draw = random.Random(0)
        crops = [Region(0, 0, *size), Region(3, size[1] - 9, 20, 1)]
        for _ in range(40):
            x, y = draw.randrange(size[0]), draw.randrange(size[1])
            crops.append(Region(x, y, draw.randint(1, size[0] - x), draw.randint(1, size[1] - y)))
        sparing = [painted(compositor, crop) for crop in crops]
        monkeypatch.setattr(SparingCompositor, "_get_renders", Compositor._get_renders)
        assert sparing == [painted(compositor, crop) for crop in crops]


async def test_only_rows_to_be_painted_are_rendered(chat, monkeypatch) -> None:
    async with chat(ScriptedEngine([TEXT * 4, TEXT])) as c:
        await c.say("One")
        await c.say("Two")
        rows: list[int] = []
        render = Background.render_lines

        def counted(self, crop: Region):
            rows.append(crop.height)
            return render(self, crop)

        monkeypatch.setattr(Background, "render_lines", counted)
        painted(c.app.chat._compositor, Region(4, 8, 10, 2))
        assert rows and max(rows) == 2


async def test_a_reply_that_grows_by_a_line_takes_one_layout(chat, monkeypatch) -> None:
    async with chat(ScriptedEngine(["word " * 4])) as c:
        await c.say("One")
        view = c.pane.query_one(GrowingMarkdown)
        await c.pilot.pause(0.2)
        layouts: list[int] = []
        reflow = Compositor.reflow

        def counted(self, parent, size):
            layouts.append(view.size.height)
            return reflow(self, parent, size)

        monkeypatch.setattr(Compositor, "reflow", counted)
        high = view.size.height
        view.feed("\n\nAnother line.")
        await c.until(lambda: view.size.height == high + 2)
        await c.pilot.pause(0.2)
        assert len(layouts) == 1, "it fits the screen: nothing scrolls"
        assert c.screen().count("Another line.") == 1


async def test_lines_that_stay_are_finished_once(chat, monkeypatch) -> None:
    async with chat(ScriptedEngine(["many words " * 40])) as c:
        await c.say("One")
        view = c.pane.query_one(GrowingMarkdown)
        assert view.size.height > 3
        finished: list[str] = []
        finish = view._finish
        monkeypatch.setattr(
            view, "_finish", lambda line, *a: (finished.append(line.text), finish(line, *a))[1]
        )
        view.feed("and one")
        await c.until(lambda: "and one" in c.screen())
        assert len(finished) == 1 and "and one" in finished[0]


async def test_a_change_of_theme_reaches_every_ground(chat) -> None:
    async with chat(ScriptedEngine([TEXT])) as c:
        await c.say("One")
        grounds = [w for w in c.app.chat.walk_children() if isinstance(w, Background)]
        assert len(grounds) == 8, "three containers, the answer, four charts"
        before = c.pane.query_one(Transcript).background_colour
        c.app.change(theme="dspark-light" if c.app.current_theme.dark else "dspark-dark")
        await c.until(lambda: c.pane.query_one(Transcript).background_colour != before)
        await c.pilot.pause()
        for widget in grounds:
            assert widget.background_colour == widget.background_colors[1], widget


async def test_a_reader_who_scrolls_up_as_the_text_is_resized_stays_there(chat) -> None:
    async with chat(ScriptedEngine(["line\n\n" * 60])) as c:
        await c.say("One")
        transcript = c.pane.query_one(Transcript)
        assert transcript.following and transcript.show_vertical_scrollbar
        transcript.on_resize()
        transcript.scroll_to(y=3, animate=False, immediate=True)
        await c.pilot.pause(0.2)
        assert transcript.scroll_y == 3 and not transcript.following


@pytest.mark.parametrize("way", ["resize", "panel"])
async def test_a_width_that_comes_back_shows_the_text_as_before(chat, way) -> None:
    text = "Jack's crew was a motley crew, and they were all seasoned sailors. " * 6 + TEXT
    async with chat(ScriptedEngine([text]), size=(120, 40)) as c:
        await c.say("One")
        view = c.pane.query_one(GrowingMarkdown)
        before = left(c.screen())
        high = view.size.height
        for _ in range(2):
            if way == "panel":
                await c.press("ctrl+l")
            else:
                width = 70 if c.app.size.width == 120 else 120
                await c.pilot.resize_terminal(width, 40)
            await c.pilot.pause(0.3)
            assert len(view._lines) == view.size.height
        assert view.size.height == high
        assert left(c.screen()) == before


def left(screen: str) -> list[str]:
    """The conversation: without charts, and without the strip below it."""
    return [line[:74] for line in screen.splitlines()[1:28]]


async def test_text_that_is_selected_can_be_read(chat) -> None:
    async with chat(ScriptedEngine(["Some words to be marked."])) as c:
        await c.say("One")
        view = c.pane.query_one(GrowingMarkdown)
        at = view.region
        await c.pilot.mouse_down(offset=(at.x + 2, at.y))
        await c.pilot.hover(offset=(at.x + 12, at.y))
        await c.pilot.mouse_up(offset=(at.x + 12, at.y))
        await c.pilot.pause()
        plain = view._finish(view._lines[0], view.background_colour)
        [line] = view.render_lines(Region(0, 0, view.size.width + 4, 1))
        marked = [s for s in line if s.text.strip() and s.style.bgcolor not in grounds(plain)]
        assert "".join(s.text for s in marked).strip() == "Some words"
        for segment in marked:
            assert segment.style.color != segment.style.bgcolor


def grounds(strip):
    return {segment.style.bgcolor for segment in strip}
