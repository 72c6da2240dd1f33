"""The input box: lines, pastes, history, and drafts that are never lost."""

from __future__ import annotations

import time

import pytest
from scripted import ScriptedEngine
from textual import events

from tui.session_store import SessionStore
from tui.widgets.pane import Transcript


async def test_ctrl_d_and_ctrl_c_never_lose_a_draft(chat) -> None:
    store = SessionStore(None)
    async with chat(store=store) as c:
        c.pane.prompt.put("half a thought")
        await c.press("ctrl+d")
        assert c.pane.prompt.text == "half a thought" and c.app.is_running
        await c.press("ctrl+c")
        assert c.pane.prompt.text == "half a thought"
        c.app.chat.save_now()
        await c.until(lambda: store.unsent() is not None, "the draft on disk")


async def test_every_newline_key_makes_a_line_and_enter_sends_all(chat) -> None:
    async with chat() as c:
        await c.press("a", "ctrl+j", "b", "shift+enter", "c", "alt+enter", "d")
        assert c.pane.prompt.text == "a\nb\nc\nd"
        await c.press("enter")
        await c.until(lambda: c.engine.requests)
        assert c.engine.requests[0].messages[-1]["content"] == "a\nb\nc\nd"


async def test_a_paste_of_two_thousand_lines_is_one_message_at_once(chat) -> None:
    lines = "\n".join(f"line {n} of the paste" for n in range(2000))
    async with chat() as c:
        prompt = c.pane.prompt
        prompt.focus()
        started = time.process_time()
        prompt.post_message(events.Paste(lines))
        await c.until(lambda: prompt.text == lines, "the paste")
        spent = time.process_time() - started
        assert c.engine.requests == [], "nothing is sent by a paste"
        await c.press("enter")
        await c.until(lambda: c.engine.requests)
        assert c.engine.requests[0].messages[-1]["content"] == lines
        await c.until(lambda: "1,986 more lines" in c.screen(), "the fold")
        assert spent < 5, f"{spent:.1f} s of work for a paste"


async def test_control_codes_in_a_paste_are_taken_out(chat) -> None:
    async with chat() as c:
        c.pane.prompt.post_message(events.Paste("a\x1b[31mb\r\nc"))
        await c.until(lambda: c.pane.prompt.text == "ab\nc")


async def test_up_and_down_walk_through_earlier_inputs_and_back_to_the_draft(chat) -> None:
    async with chat() as c:
        await c.say("first")
        await c.say("second\nline")
        c.pane.prompt.put("draft")
        await c.press("up")
        assert c.pane.prompt.text == "second\nline"
        await c.press("up")
        assert c.pane.prompt.text == "second\nline", "up moves within the lines first"
        await c.press("up")
        assert c.pane.prompt.text == "first"
        await c.press("down", "down", "down")
        assert c.pane.prompt.text == "draft"


async def test_text_typed_while_a_reply_is_written_stays(chat) -> None:
    engine = ScriptedEngine()
    engine.hold = True
    async with chat(engine) as c:
        await c.say("Go", wait=False)
        c.pane.prompt.put("the next question")
        await c.press("enter")
        await c.until(lambda: c.told("Still writing"))
        assert c.pane.prompt.text == "the next question" and len(engine.requests) == 1


async def test_typing_reaches_the_box_while_a_reply_is_written(chat) -> None:
    engine = ScriptedEngine([("word " * 20 + "\n\n") * 40])
    async with chat(engine, size=(120, 40)) as c:
        await c.say("Go", wait=False)
        c.pane.prompt.focus()
        for key in "hello":
            await c.press(key)
        assert c.pane.prompt.text == "hello"
        assert c.conversation.active, "the reply was still being written"


async def test_what_was_typed_just_before_quitting_is_there_again(chat) -> None:
    store = SessionStore(None)
    close, store.close = store.close, lambda: None  # type: ignore[method-assign]
    async with chat(store=store) as c:
        c.app.chat.save_now()
        c.pane.prompt.put("half a thought")
        await c.until(lambda: c.conversation.draft)
        await c.press("ctrl+q")
    unsent = store.unsent()
    assert unsent is not None and store.load(unsent).draft == "half a thought"
    close()


async def test_page_keys_scroll_the_chat_from_the_box_and_a_long_draft_itself(chat) -> None:
    async with chat(ScriptedEngine(["line\n\n" * 60])) as c:
        await c.say("One")
        transcript = c.pane.query_one(Transcript)
        end = transcript.scroll_y
        assert end > 20
        await c.press("pageup")
        await c.until(lambda: 0 < transcript.scroll_y < end)
        assert not transcript.following
        await c.press("pagedown")
        await c.until(lambda: transcript.scroll_y == end and transcript.following)
        c.pane.prompt.put("\n".join(str(n) for n in range(50)))
        await c.pilot.pause()
        await c.press("pageup")
        await c.until(lambda: c.pane.prompt.cursor_location[0] < 45)
        assert transcript.scroll_y >= end


@pytest.mark.parametrize("size", [(20, 5), (40, 8), (40, 10)])
async def test_what_is_typed_can_be_seen_on_any_screen(chat, size) -> None:
    async with chat(size=size) as c:
        await c.press(*"hello")
        await c.until(lambda: "hello" in c.screen())
