"""Open conversations: side by side, in tabs, scrolled, and reached by keyboard."""

from __future__ import annotations

import asyncio

from scripted import ScriptedEngine
from textual.widgets import Static

from tui.session_store import SessionStore
from tui.widgets.message_view import MessageView
from tui.widgets.pane import Transcript
from tui.widgets.prompt_box import PromptBox


async def test_two_chats_write_side_by_side(chat) -> None:
    engine = ScriptedEngine(["left " * 60, "right " * 60])
    engine.hold = True
    async with chat(engine, size=(160, 40)) as c:
        await c.say("One", wait=False)
        await c.press("f6")
        await c.until(lambda: len(c.app.chat.panes) == 2)
        await c.say("Two", wait=False)
        await c.until(lambda: sum(bool(p.conversation.active) for p in c.app.chat.panes) == 2)
        await c.until(lambda: len(c.app.stats.active) == 2)
        engine.hold = False
        await c.until(lambda: not any(p.conversation.active for p in c.app.chat.panes))
        await c.settled()
        await c.until(lambda: "left left" in c.screen() and "right right" in c.screen())
        texts = [p.conversation.messages[1].text.split()[0] for p in c.app.chat.panes]
        assert sorted(texts) == ["left", "right"]


async def test_tabs_keep_each_draft_and_are_reached_by_key_and_mouse(chat) -> None:
    async with chat() as c:
        await c.say("Alpha")
        c.pane.prompt.put("draft of alpha")
        await c.press("ctrl+n")
        await c.until(lambda: len(c.app.chat.panes) == 2)
        await c.say("Beta")
        await c.press("f7")
        assert c.conversation.title == "Alpha" and c.pane.prompt.text == "draft of alpha"
        await c.pilot.click("TabBar", offset=(12, 0))
        await c.until(lambda: c.conversation.title == "Beta")
        await c.press("f9")
        await c.until(lambda: len(c.app.chat.panes) == 1)
        assert c.conversation.title == "Alpha"


async def test_a_reader_who_scrolled_up_is_not_pulled_down(chat) -> None:
    engine = ScriptedEngine(["line\n\n" * 60, "more\n\n" * 60])
    engine.words = 20
    async with chat(engine) as c:
        await c.say("One")
        transcript = c.pane.query_one(Transcript)
        await c.until(
            lambda: transcript.scroll_y == transcript.max_scroll_y > 20, "new text is followed"
        )
        engine.hold_after = 1
        await c.say("Two", wait=False)
        await c.until(lambda: len(c.conversation.messages[3].text) > 20)
        transcript.scroll_to(y=3, animate=False)
        await c.until(lambda: transcript.scroll_y == 3)
        engine.hold = False
        assert c.conversation.active, "most of the reply is still to come"
        await c.until(lambda: not c.conversation.active)
        await c.settled()
        assert transcript.scroll_y == 3
        transcript.scroll_end(animate=False)
        await c.until(lambda: transcript.following, "following again at the end")


async def test_long_histories_open_with_the_newest_and_show_earlier_on_demand(chat) -> None:
    store = SessionStore(None)
    async with chat(store=store) as c:
        from tui.conversation import ChatMessage, Conversation

        old = Conversation(title="long")
        for n in range(60):
            old.messages += [ChatMessage("user", f"q{n}"), ChatMessage("assistant", f"a{n}")]
        store.save(old, "toy")
        again = store.load(old.session)
        pane = await c.app.chat.open(again)
        await c.until(lambda: len(pane.views) == 24)
        await c.settled()
        assert pane.views[-1].message.text == "a59"
        await c.until(lambda: "a59" in c.screen())
        await pane.action_show_earlier()
        assert len(pane.views) == 48 and pane.views[0].message.text == "q36"


async def test_messages_are_reached_by_keyboard(chat) -> None:
    async with chat() as c:
        await c.say("One")
        await c.press("shift+tab")
        assert isinstance(c.app.focused, MessageView)
        await c.press("up")
        assert c.app.focused is c.pane.views[0]
        await c.press("down")
        assert c.app.focused is c.pane.views[1]
        await c.until(lambda: "Write again" in c.screen(), "what can be done, in the footer")
        await c.press("tab")
        assert isinstance(c.app.focused, PromptBox)


async def test_the_welcome_goes_when_the_first_message_comes(chat) -> None:
    async with chat() as c:
        await c.until(lambda: "Type below" in c.screen())
        await c.say("One")
        await c.until(lambda: "Type below" not in c.screen())
        assert isinstance(c.pane.query_one(".welcome"), Static)


async def test_the_welcome_fits_the_pane_line_by_line(chat) -> None:
    for size in ((80, 24), (120, 40)):
        async with chat(size=size) as c:
            await c.until(lambda: "Type below" in c.screen())
            welcome = c.pane.query_one(".welcome", Static)
            assert welcome.content_size.height == str(welcome.visual).count("\n") + 1


async def test_a_chat_closed_while_its_reply_runs_was_stopped_not_interrupted(chat) -> None:
    store = SessionStore(None)
    engine = ScriptedEngine(["never ending " * 200])
    async with chat(engine, store=store) as c:
        await c.say("One", wait=False)
        await c.until(lambda: c.conversation.messages[1].text)
        closed = c.conversation
        await c.press("f9")
        await c.until(lambda: c.conversation is not closed)
        await c.until(lambda: store.load(closed.session).messages[1].state == "stopped")
        written = closed.messages[1].text
        await c.app.chat.open(store.load(closed.session))
        await c.until(lambda: "Stopped." in c.screen() and "program ended" not in c.screen())
        assert c.conversation.messages[1].text == written


async def test_a_chat_on_its_way_out_is_not_touched_by_what_still_comes(chat) -> None:
    engine = ScriptedEngine(["left " * 200, "right " * 200])
    async with chat(engine, pinned={"token_colours": True}) as c:
        await c.say("One", wait=False)
        await c.press("ctrl+n")
        await c.until(lambda: len(c.app.chat.panes) == 2)
        await c.say("Two", wait=False)
        closing = asyncio.create_task(c.app.chat.action_close())
        while not closing.done():
            await c.app.tick()
            c.app.chat.redraw()
            c.app.chat.action_origin()
            await asyncio.sleep(0)
        await closing
        assert [p.conversation.title for p in c.app.chat.panes] == ["One"]
        await c.until(lambda: not c.conversation.active)
        assert c.conversation.messages[1].text.split() == ["left"] * 200


async def test_a_reply_dropped_while_the_next_one_starts_is_not_touched(chat) -> None:
    engine = ScriptedEngine(["old " * 20, "new " * 20])
    async with chat(engine) as c:
        await c.say("One")
        again = asyncio.create_task(c.app.chat.action_regenerate())
        while not again.done():
            await c.app.tick()
            c.app.chat.action_origin()
            await asyncio.sleep(0)
        await again
        await c.until(lambda: not c.conversation.active)
        assert c.conversation.messages[1].text.split() == ["new"] * 20
