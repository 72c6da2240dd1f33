"""The chat itself, driven by keys on a scripted backend."""

from __future__ import annotations

import time

from scripted import ScriptedBackend
from textual import events
from textual.widgets import Static

from tui.sessions import SessionStore
from tui.widgets.message import MessageView
from tui.widgets.pane import Transcript
from tui.widgets.prompt import Prompt

MARKDOWN = """# Title

Some **bold** text and `code`.

```python
def f(x):
    return x + 1
```

| a | b |
|---|---|
| 1 | 2 |

- one
- two

Done."""


async def test_a_reply_streams_in_as_markdown(chat) -> None:
    async with chat(ScriptedBackend([MARKDOWN])) as c:
        await c.say("Show me")
        screen = c.screen()
        assert "def f(x):" in screen and "Title" in screen and "Done." in screen
        assert "```" not in screen and "**" not in screen, "Markdown is rendered"
        names = {type(w).__name__ for w in c.app.chat.query("*")}
        assert {"MarkdownFence", "MarkdownTable", "MarkdownBulletList"} <= names
        assert c.conversation.messages[1].text == MARKDOWN


async def test_the_next_turn_sends_the_whole_conversation(chat) -> None:
    async with chat(ScriptedBackend(["First answer.", "Second."])) as c:
        c.conversation.system = "Be kind."
        await c.say("One")
        await c.say("Two")
        turns = [(m["role"], m["content"]) for m in c.backend.requests[-1].messages]
        assert turns == [
            ("system", "Be kind."),
            ("user", "One"),
            ("assistant", "First answer."),
            ("user", "Two"),
        ]


async def test_escape_stops_the_reply_and_keeps_what_was_written(chat) -> None:
    backend = ScriptedBackend(["word " * 400])
    async with chat(backend) as c:
        await c.say("Go", wait=False)
        await c.until(lambda: len(c.conversation.messages[1].text) > 20)
        backend.hold = True
        await c.press("escape")
        await c.until(lambda: not c.conversation.active)
        assert ("cancel", backend.requests[0].id) in backend.calls
        assert c.conversation.messages[1].state == "stopped"
        assert "word word" in c.conversation.messages[1].text
        await c.until(lambda: "Stopped" in c.screen())


async def test_ctrl_c_first_stops_then_asks_then_quits(chat) -> None:
    backend = ScriptedBackend(["word " * 400])
    async with chat(backend) as c:
        await c.say("Go", wait=False)
        await c.press("ctrl+c")
        await c.until(lambda: not c.conversation.active)
        assert c.app.is_running
        await c.press("ctrl+c")
        await c.until(lambda: "again to quit" in c.screen(), "the question")
        assert c.app._exit is False
        await c.press("ctrl+c")
        await c.until(lambda: c.app._exit, "the end")
    assert backend.closed, "nothing is left running"


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
        await c.until(lambda: c.backend.requests)
        assert c.backend.requests[0].messages[-1]["content"] == "a\nb\nc\nd"


async def test_a_paste_of_two_thousand_lines_is_one_message_at_once(chat) -> None:
    lines = "\n".join(f"line {n} of the paste" for n in range(2000))
    async with chat() as c:
        prompt = c.pane.prompt
        prompt.focus()
        started = time.process_time()
        prompt.post_message(events.Paste(lines))
        await c.until(lambda: prompt.text == lines, "the paste")
        spent = time.process_time() - started
        assert c.backend.requests == [], "nothing is sent by a paste"
        await c.press("enter")
        await c.until(lambda: c.backend.requests)
        assert c.backend.requests[0].messages[-1]["content"] == lines
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
    backend = ScriptedBackend()
    backend.hold = True
    async with chat(backend) as c:
        await c.say("Go", wait=False)
        c.pane.prompt.put("the next question")
        await c.press("enter")
        await c.until(lambda: c.told("Still writing"))
        assert c.pane.prompt.text == "the next question" and len(backend.requests) == 1


async def test_regenerate_replaces_the_reply(chat) -> None:
    store = SessionStore(None)
    async with chat(ScriptedBackend(["Old answer.", "New answer."]), store=store) as c:
        await c.say("Why?")
        await c.press("ctrl+r")
        await c.until(lambda: len(c.backend.requests) == 2)
        await c.until(lambda: not c.conversation.active)
        assert [m.text for m in c.conversation.messages] == ["Why?", "New answer."]
        assert [m["role"] for m in c.backend.requests[1].messages] == ["user"]
        await c.settled()
        assert "New answer." in c.screen() and "Old answer." not in c.screen()
        saved = store.load(c.conversation.session)
        await c.until(lambda: store.load(c.conversation.session).messages[1].text == "New answer.")
        assert saved is not None and len(saved.messages) == 2


async def test_edit_and_resend_drops_what_came_after(chat) -> None:
    async with chat(ScriptedBackend(["A1.", "A2.", "A3."])) as c:
        await c.say("Q1")
        await c.say("Q2")
        c.pane.prompt.put("kept draft")
        first = c.pane.views[0]
        first.focus()
        await c.press("e")
        await c.until(lambda: c.pane.prompt.text == "Q1")
        assert "Editing" in c.screen()
        await c.press("escape")
        assert c.pane.prompt.text == "kept draft", "Esc leaves everything as it was"
        assert len(c.conversation.messages) == 4
        first.focus()
        await c.press("e")
        await c.until(lambda: c.pane.prompt.text == "Q1")
        c.pane.prompt.put("Q1 better")
        await c.press("enter")
        await c.until(lambda: len(c.backend.requests) == 3 and not c.conversation.active)
        assert [m.text for m in c.conversation.messages] == ["Q1 better", "A3."]
        assert [m.message for m in c.pane.views] == c.conversation.messages


async def test_copy_takes_the_message_or_its_code_blocks_in_turn(chat) -> None:
    text = "x\n```py\none()\n```\ny\n```sh\ntwo\n```\n"
    async with chat(ScriptedBackend([text]), environ={"PATH": "", "SSH_TTY": "x"}) as c:
        await c.say("code")
        c.pane.views[1].focus()
        await c.press("c")
        await c.until(lambda: c.app.clipboard == c.conversation.messages[1].text)
        await c.press("y")
        await c.until(lambda: c.app.clipboard == "one()")
        await c.press("y")
        await c.until(lambda: c.app.clipboard == "two")
        await c.until(lambda: c.told("code block 2 of 2"))


async def test_a_thought_is_shown_apart_and_folded(chat) -> None:
    async with chat(ScriptedBackend(["<think>\nsecret plan\n</think>\n\nThe answer."])) as c:
        await c.say("Think")
        assert "The answer." in c.screen() and "secret plan" not in c.screen()
        assert "▸ Thought (2 words)" in c.screen()
        c.pane.views[1].focus()
        await c.press("t")
        await c.until(lambda: "secret plan" in c.screen())
        await c.say("Go on")
        sent = [m["content"] for m in c.backend.requests[-1].messages]
        assert "<think>\nsecret plan\n</think>\n\nThe answer." in sent, "history keeps the thought"


async def test_a_reader_who_scrolled_up_is_not_pulled_down(chat) -> None:
    backend = ScriptedBackend(["line\n\n" * 60, "more\n\n" * 60])
    async with chat(backend) as c:
        await c.say("One")
        transcript = c.pane.query_one(Transcript)
        await c.until(lambda: transcript.max_scroll_y > 20)
        assert transcript.scroll_y == transcript.max_scroll_y, "new text is followed"
        await c.say("Two", wait=False)
        await c.until(lambda: len(c.conversation.messages[3].text) > 20)
        transcript.scroll_to(y=3, animate=False)
        await c.until(lambda: transcript.scroll_y == 3)
        await c.until(lambda: not c.conversation.active)
        await c.settled()
        assert transcript.scroll_y == 3
        transcript.scroll_end(animate=False)
        await c.until(lambda: transcript.following, "following again at the end")


async def test_two_chats_write_side_by_side(chat) -> None:
    backend = ScriptedBackend(["left " * 60, "right " * 60])
    backend.hold = True
    async with chat(backend, size=(160, 40)) as c:
        await c.say("One", wait=False)
        await c.press("f6")
        await c.until(lambda: len(c.app.chat.panes) == 2)
        await c.say("Two", wait=False)
        await c.until(lambda: sum(bool(p.conversation.active) for p in c.app.chat.panes) == 2)
        await c.until(lambda: len(c.app.live.active) == 2)
        backend.hold = False
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


async def test_a_turn_is_saved_before_anything_is_generated(chat) -> None:
    store = SessionStore(None)

    class Checking(ScriptedBackend):
        def submit(self, request) -> None:
            entry = store.entries()[0]
            saved = store.load(entry.session)
            assert saved is not None and saved.messages[0].text == "Why?"
            super().submit(request)

    async with chat(Checking(), store=store) as c:
        await c.say("Why?")
        await c.until(lambda: store.load(c.conversation.session).messages[1].state == "done")


async def test_a_reply_under_way_is_on_disk_within_a_second(chat) -> None:
    store = SessionStore(None)
    backend = ScriptedBackend(["word " * 300])
    async with chat(backend, store=store) as c:
        await c.say("Go", wait=False)
        await c.until(lambda: len(c.conversation.messages[1].text) > 30)
        backend.hold = True
        await c.pilot.pause()
        text = c.conversation.messages[1].text
        await c.until(
            lambda: store.load(c.conversation.session).messages[1].text == text, "the save", 5
        )


async def test_an_engine_failure_is_one_line_and_the_chat_goes_on(chat) -> None:
    from scripted import finished

    from dspark_mlx.events import Failed

    backend = ScriptedBackend()
    backend.hold = True
    async with chat(backend) as c:
        await c.say("One", wait=False)
        backend.emit(
            finished(
                backend.requests[0].id, "error", message="out of memory", hint="close programs"
            )
        )
        await c.until(lambda: "out of memory (close programs)" in c.screen())
        backend.emit(Failed("the model's file is gone", "load it again with F5"))
        await c.until(lambda: "the model's file is gone" in c.screen())
        assert c.told("load it again with F5")
        backend.hold = False
        await c.say("Two")
        assert c.conversation.messages[-1].state == "done"
        backend.broken = RuntimeError("engine thread died")
        await c.until(lambda: "engine thread died" in c.screen())
        assert c.app.is_running


async def test_a_first_prompt_from_the_command_line_is_sent(chat) -> None:
    async with chat(prompt="Hello there") as c:
        await c.until(lambda: c.backend.requests)
        assert c.backend.requests[0].messages[-1]["content"] == "Hello there"


async def test_a_saved_chat_is_resumed_with_its_figures_and_can_go_on(chat) -> None:
    store = SessionStore(None)
    async with chat(ScriptedBackend(["Answer one."]), store=store) as c:
        await c.say("Question one")
        session = c.conversation.session
        await c.until(lambda: store.load(session).messages[1].state == "done")
        await c.press("ctrl+n")
        await c.until(lambda: len(c.app.chat.panes) == 2)
        await c.press("f7", "f9")
        await c.until(lambda: len(c.app.chat.panes) == 1)
        await c.app.chat.open(store.load(session))
        await c.until(lambda: "Answer one." in c.screen())
        assert "5 tokens" in c.screen() and c.conversation.session == session
        await c.say("Question two")
        assert [m["role"] for m in c.backend.requests[-1].messages] == ["user", "assistant", "user"]
        assert len(store.entries()) == 1


HOSTILE = {
    "markup": "[red]x[/red] [/] [[ ]] [b [link=a]y[/link] {}${x} \\[z]",
    "ansi": "\x1b[31mred\x1b[0m \x1b]0;t\x07 \x1b[2J\x9b5m after",
    "rtl": "שלום עולם مرحبا \u202eabc\u202c end",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301 Z͑ͫ̓͊ end",
    "cjk": "你好，世界。" * 30,
    "long": "x" * 100_000,
    "tags": "List<int> <b>bold</b> <script>alert(1)</script> <think> &amp;",
    "blank": " \n\n \t \n",
    "fences": "```\nunclosed [x]\n~~~\n````md\n```\n",
    "nested": "> " * 40 + "deep\n" + "- " * 40 + "deeper\n" + "#" * 30,
    "table": "|a|\n|-|\n" + "|[x]|\n" * 40,
    "zero": "\u200b\u200d\ufeff\u2060 end",
}


async def test_any_text_is_shown_as_text_and_crashes_nothing(chat) -> None:
    backend = ScriptedBackend()
    backend.words = 200
    async with chat(backend, size=(80, 24)) as c:
        for name, text in HOSTILE.items():
            backend.replies.append(text)
            await c.say(text if text.strip() else "blank")
            assert c.conversation.messages[-1].text == text, name
            screen = c.screen()
            assert "\x1b" not in screen and "\u202e" not in screen, name
            if name == "tags":
                assert "<script>alert(1)</script>" in screen and "List<int>" in screen
            if name == "markup":
                assert "[red]x[/red]" in screen
        await c.press("ctrl+t", "ctrl+g", "escape", "ctrl+t")
        await c.settled()
        assert c.app.is_running
        await c.press("ctrl+o")
        await c.until(lambda: type(c.app.screen).__name__ == "SessionsScreen")
        assert "[red]x" in c.screen(), "titles are text as well"
        await c.press("escape")


async def test_long_histories_open_with_the_newest_and_show_earlier_on_demand(chat) -> None:
    store = SessionStore(None)
    async with chat(store=store) as c:
        from tui.conversation import Conversation, Message

        old = Conversation(title="long")
        for n in range(60):
            old.messages += [Message("user", f"q{n}"), Message("assistant", f"a{n}")]
        store.save(old, "toy")
        again = store.load(old.session)
        pane = await c.app.chat.open(again)
        await c.until(lambda: len(pane.views) == 24)
        await c.settled()
        assert pane.views[-1].message.text == "a59" and "a59" in c.screen()
        await pane.show_earlier()
        assert len(pane.views) == 48 and pane.views[0].message.text == "q36"


async def test_typing_reaches_the_box_while_a_reply_is_written(chat) -> None:
    backend = ScriptedBackend([("word " * 20 + "\n\n") * 40])
    async with chat(backend, size=(120, 40)) as c:
        await c.say("Go", wait=False)
        c.pane.prompt.focus()
        for key in "hello":
            await c.press(key)
        assert c.pane.prompt.text == "hello"
        assert c.conversation.active, "the reply was still being written"


async def test_messages_are_reached_by_keyboard(chat) -> None:
    async with chat() as c:
        await c.say("One")
        await c.press("shift+tab")
        assert isinstance(c.app.focused, MessageView)
        await c.press("up")
        assert c.app.focused is c.pane.views[0]
        await c.press("down")
        assert c.app.focused is c.pane.views[1]
        assert "Regenerate" in c.screen(), "the footer shows what can be done with it"
        await c.press("tab")
        assert isinstance(c.app.focused, Prompt)


async def test_the_welcome_goes_when_the_first_message_comes(chat) -> None:
    async with chat() as c:
        assert "Type below" in c.screen()
        await c.say("One")
        assert "Type below" not in c.screen()
        assert isinstance(c.pane.query_one(".welcome"), Static)
