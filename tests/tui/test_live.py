"""The live view: token colours, strip, panel, monitor, and that they show the engine's numbers."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from make_trace import make
from scripted import ScriptedEngine, step
from textual.color import Color

from tui import themes
from tui.replay import ReplayEngine
from tui.screens.monitor import MonitorScreen
from tui.widgets.chart import Chart
from tui.widgets.live_panel import LivePanel
from tui.widgets.pane import Transcript
from tui.widgets.tokens import TokenText


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def replay(requests: int = 1, tokens: int = 200, **more) -> ReplayEngine:
    return ReplayEngine(make(requests, tokens), 1.0, Clock(), **more)


async def play(c, seconds: float) -> None:
    """Let ``seconds`` of the recording pass."""
    c.engine._clock.now += seconds
    version = c.app.stats.version
    await c.until(lambda: c.app.stats.version > version, "events of the recording")
    await c.pilot.pause()


async def test_tokens_are_coloured_by_origin_at_a_key_and_plain_by_default(chat) -> None:
    engine = ScriptedEngine(["one two three four five six seven eight"])
    async with chat(engine) as c:
        await c.say("Go")
        assert not c.app.chat.query(TokenText), "plain reading is the default"
        await c.press("ctrl+t")
        view = await c.until(lambda: next(iter(c.app.chat.query(TokenText)), None))
        (line,) = await c.until(lambda: view._lines)
        assert line.text.rstrip() == "one two three four five six seven eight"
        styled = [(segment.text, segment.style) for segment in line if segment.style]
        own = [text for text, style in styled if style.underline]
        drafted = [text for text, style in styled if style.bgcolor]
        assert own == [" six", " eight"]
        assert "".join(drafted).split() == ["one", "two", "three", "four", "five", "seven"]
        await c.press("ctrl+t")
        await c.until(lambda: not c.app.chat.query(TokenText))


async def test_the_ground_of_a_token_is_stronger_the_surer_the_drafter_was(chat) -> None:
    async with chat() as c:
        view = TokenText([(" a", "draft", 0.1), (" b", "draft", 0.95), (" c", "target", None)])
        await c.pane.query_one(Transcript).mount(view)
        (line,) = await c.until(lambda: view._lines)
        weak, strong, own = (segment.style for segment in line if segment.style)
        # The ground is dark and the drafter's colour bright.
        assert sum(weak.bgcolor.triplet) < sum(strong.bgcolor.triplet)
        assert own.bgcolor is None and own.underline


def shown(view: TokenText) -> str:
    """What is on the lines, without blanks: those at a line's end are not kept."""
    return "".join("".join(strip.text for strip in view._lines).split())


async def test_a_growing_reply_is_coloured_while_it_is_written(chat) -> None:
    async with chat(replay(play=False), pinned={"token_colours": True}) as c:
        await c.say("Go", wait=False)
        await play(c, 1.0)
        view = await c.until(lambda: next(iter(c.app.chat.query(TokenText)), None))
        before = len(shown(view))
        await play(c, 1.0)
        await c.until(lambda: len(shown(view)) > before)
        await play(c, 100)
        await c.until(lambda: not c.conversation.active)
        assert shown(view) == "".join(c.conversation.messages[1].text.split())


async def test_what_was_written_below_the_monitor_is_there_on_return(chat) -> None:
    async with chat(replay(play=False)) as c:
        await c.say("Go", wait=False)
        await c.press("ctrl+g")
        await play(c, 100)
        await c.until(lambda: not c.conversation.active)
        await c.press("escape")
        last = c.conversation.messages[1].text.split()[-1]
        await c.until(lambda: last in c.screen() and "Assistant  writing" not in c.screen())


async def test_the_strip_shows_the_round_and_why_it_was_cut(chat) -> None:
    engine = ScriptedEngine()
    engine.hold = True
    async with chat(engine, size=(120, 40)) as c:
        await c.say("Go", wait=False)
        engine.emit(step(engine.requests[0].id, [" the", " cat"], 1))
        await c.until(lambda: "verifying 1 more would cost 3.0 ms" in c.screen())
        screen = c.screen()
        for part in ("3 drafted → 2 verified → 1 kept + 1", "·the", "✓ kept", "✗ wrong", "· cut",
                     "target's", "90%", "80%", "60%"):  # fmt: skip
            assert part in screen, part


async def test_the_panel_shows_speed_against_the_baseline(chat) -> None:
    async with chat(replay(play=False), size=(120, 50)) as c:
        await c.say("Go", wait=False)
        await play(c, 3.0)
        live = c.app.stats
        speedup = f"×{live.speedup:.2f}"
        await c.until(lambda: speedup in c.screen())
        for name in ("tokens/s", "draft length", "cuts", "kept at position", "round", "time",
                     "memory", "context", "slowdown", "acceptance",
                     f"over {live.plain_tps:.1f} plain"):  # fmt: skip
            await c.until(lambda name=name: name in c.screen(), name)
        await c.press("ctrl+l")
        await c.until(lambda: not c.app.chat.query_one(LivePanel).display)
        await c.until(lambda: "kept at position" not in c.screen())


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60), (40, 10), (20, 5)])
async def test_every_size_shows_the_chat_and_the_monitor(chat, size) -> None:
    async with chat(replay(1, 600, play=False), size=size) as c:
        await c.say("Go", wait=False)
        await play(c, 3.0)
        await c.until(lambda: "tok/s" in c.screen() or size[1] < 10)
        await c.press("ctrl+g")
        await c.until(lambda: isinstance(c.app.screen, MonitorScreen))
        await play(c, 1.0)
        names: tuple[str, ...] = ()
        if size[0] >= 80:
            names = ("requests", "decoding", "decision")
        if size == (200, 60):
            names += ("cost of a step", "confidence", "tokens a round", "slowdown", "◆", "●")
        await c.until(lambda: all(name in c.screen() for name in names), ", ".join(names))
        await c.press("escape")
        await c.until(lambda: not isinstance(c.app.screen, MonitorScreen))


async def test_the_monitor_lists_every_request_and_follows(chat) -> None:
    async with chat(replay(3, 300), size=(120, 40)) as c:
        await play(c, 2.0)
        await c.press("ctrl+g")
        await c.until(lambda: isinstance(c.app.screen, MonitorScreen))
        await play(c, 2.0)

        def table() -> str:
            return c.app.screen.query(Chart).first().plain

        assert len(c.app.stats.requests) == 3
        await c.until(lambda: all(f"…{id[-10:]} " in table() for id in c.app.stats.requests))
        before = table()
        await play(c, 2.0)
        await c.until(lambda: table() != before)


async def test_a_recording_opens_a_chat_for_each_of_its_requests(chat) -> None:
    async with chat(replay(2, 100)) as c:
        await play(c, 1000)
        await c.until(
            lambda: (
                [p.conversation.title for p in c.app.chat.panes] == ["recording r1", "recording r2"]
            )
        )
        await c.until(lambda: not any(p.conversation.active for p in c.app.chat.panes))
        assert all(p.conversation.messages[1].text for p in c.app.chat.panes)
        await c.app.run_action("replay('restart')")
        await play(c, 1000)
        await c.until(lambda: len(c.app.chat.panes) == 4)


async def test_a_recording_can_be_paused_and_sped_up(chat) -> None:
    async with chat(replay(1, 300)) as c:
        await c.app.run_action("replay('pause')")
        version = c.app.stats.version
        c.engine._clock.now += 5
        await c.pilot.pause(0.3)
        assert c.app.stats.version == version
        await c.app.run_action("replay('pause')")
        await c.app.run_action("replay('faster')")
        assert c.engine.speed == 2.0


async def test_charts_are_not_drawn_again_when_nothing_changed(chat) -> None:
    async with chat(replay(play=False), size=(160, 50)) as c:
        await c.say("Go", wait=False)
        await play(c, 2.0)
        charts = list(c.app.chat.query(Chart))
        for chart in charts:
            chart.redraw()
        await c.pilot.pause()
        for chart in charts:
            chart._repaint_required = False
            chart.redraw()
        assert not any(chart._repaint_required for chart in charts)


@pytest.mark.parametrize("theme", ["dspark-dark", "dspark-light", "ansi-dark", "ansi-light"])
async def test_the_themes_reach_the_charts(chat, theme: str) -> None:
    async with chat(replay(play=False), size=(160, 50), pinned={"theme": theme}) as c:
        await c.say("Go", wait=False)
        await play(c, 2.0)
        wanted = c.app.theme_variables["dspark-draft"].lower()

        def colours() -> set[str]:
            return {
                segment.style.color.name.lower()
                for chart in c.app.chat.query(Chart)
                if chart.size
                for segment in chart.render_line(1)
                if segment.style and segment.style.color
            }

        await c.until(lambda: wanted in colours(), wanted)


async def test_light_and_dark_grounds_get_colours_with_contrast(chat) -> None:
    for theme, dark in ((themes.DARK, True), (themes.LIGHT, False)):
        ground = Color.parse(theme.background)
        for name, colour in themes.chart_colours(dark).items():
            assert abs(Color.parse(colour).brightness - ground.brightness) > 0.3, (theme.name, name)
    assert themes.preferred({"COLORFGBG": "0;15"}) == "dspark-light"
    assert themes.preferred({"COLORFGBG": "15;0"}) == themes.preferred({}) == "dspark-dark"


@pytest.mark.parametrize("dark", [True, False])
def test_two_lines_of_one_chart_differ_without_colour(dark: bool) -> None:
    greys = {
        name.removeprefix("dspark-"): Color.parse(colour)
        for name, colour in themes.chart_colours(dark, no_color=True).items()
    }
    assert all(colour.r == colour.g == colour.b for colour in greys.values())
    for one, other in (("measured", "predicted"), ("draft", "predicted"), ("draft", "target")):
        assert abs(greys[one].brightness - greys[other].brightness) > 0.2, (one, other)
    assert greys.keys() == {n.removeprefix("dspark-") for n in themes.chart_colours(dark)}


async def test_no_color_leaves_no_colour_and_the_marks_tell_all(chat, monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    engine = ScriptedEngine()
    engine.hold = True
    async with chat(engine, size=(120, 40), environ={"NO_COLOR": "1", "PATH": ""}) as c:
        assert c.app.no_color
        await c.say("Go", wait=False)
        engine.emit(step(engine.requests[0].id, [" the", " cat"], 1))
        await c.until(lambda: "✓ kept" in c.screen())
        grey = themes.chart_colours(dark=True, no_color=True)["dspark-predicted"]
        assert c.app.theme_variables["dspark-predicted"] == grey
        for strip in c.app.screen._compositor.render_strips(c.app.size):
            for segment in strip.apply_filter(c.app._filters[0], c.app.background_colors[0]):
                if segment.style and segment.style.color and segment.style.color.triplet:
                    red, green, blue = segment.style.color.triplet
                    assert red == green == blue


async def test_the_display_costs_little_of_what_generation_needs(chat) -> None:
    """The app's own work for a reply, in processor seconds a second of generation.

    Not a timing of the machine: the bar is ten times what it takes here.
    """
    async with chat(replay(1, 400, play=False), size=(120, 40)) as c:
        await c.say("Go", wait=False)
        started = time.process_time()
        for _ in range(24):
            c.engine._clock.now += 1 / 12
            await asyncio.sleep(1 / 12)
        spent = (time.process_time() - started) / 2
        print(f"{spent:.3f} processor seconds a second (pid {os.getpid()})")
        assert spent < 2.0
