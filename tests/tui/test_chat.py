"""The chat itself, driven by keys on a scripted engine."""

from __future__ import annotations

import asyncio

from scripted import ScriptedEngine

from tui.session_store import SessionStore

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
    async with chat(ScriptedEngine([MARKDOWN])) as c:
        await c.say("Show me")
        screen = c.screen().split("draft  round")[0]  # the strip shows the source
        assert "def f(x):" in screen and "Title" in screen and "Done." in screen
        assert "```" not in screen and "**" not in screen, "Markdown is rendered"
        assert " • one" in screen and "|---|" not in screen
        assert c.conversation.messages[1].text == MARKDOWN


async def test_the_next_turn_sends_the_whole_conversation(chat) -> None:
    async with chat(ScriptedEngine(["First answer.", "Second."])) as c:
        c.conversation.system = "Be kind."
        await c.say("One")
        await c.say("Two")
        turns = [(m["role"], m["content"]) for m in c.engine.requests[-1].messages]
        assert turns == [
            ("system", "Be kind."),
            ("user", "One"),
            ("assistant", "First answer."),
            ("user", "Two"),
        ]


async def test_escape_stops_the_reply_and_keeps_what_was_written(chat) -> None:
    engine = ScriptedEngine(["word " * 400])
    async with chat(engine) as c:
        await c.say("Go", wait=False)
        await c.until(lambda: len(c.conversation.messages[1].text) > 20)
        engine.hold = True
        await c.press("escape")
        await c.until(lambda: not c.conversation.active)
        assert ("cancel", engine.requests[0].id) in engine.calls
        assert c.conversation.messages[1].state == "stopped"
        assert "word word" in c.conversation.messages[1].text
        await c.until(lambda: "Stopped" in c.screen())


async def test_ctrl_c_first_stops_then_asks_then_quits(chat) -> None:
    engine = ScriptedEngine(["word " * 400])
    async with chat(engine) as c:
        await c.say("Go", wait=False)
        await c.press("ctrl+c")
        await c.until(lambda: not c.conversation.active)
        assert c.app.is_running
        await c.press("ctrl+c")
        await c.until(lambda: "again to quit" in c.screen(), "the question")
        assert c.app._exit is False
        await c.press("ctrl+c")
        await c.until(lambda: c.app._exit, "the end")
    assert engine.closed, "nothing is left running"


async def test_a_reply_can_be_stopped_from_the_moment_it_was_asked_for(chat) -> None:
    engine = ScriptedEngine(["word " * 400])
    async with chat(engine) as c:
        turn = asyncio.create_task(c.app.chat.ask(c.pane, "Go"))
        await c.until(lambda: c.conversation.active)
        assert [request.id for request in engine.requests] == [c.conversation.active]
        assert c.app.chat.stop()
        await turn
        await c.until(lambda: not c.conversation.active)
        assert c.conversation.messages[1].state == "stopped"


async def test_regenerate_replaces_the_reply(chat) -> None:
    store = SessionStore(None)
    async with chat(ScriptedEngine(["Old answer.", "New answer."]), store=store) as c:
        await c.say("Why?")
        await c.press("ctrl+r")
        await c.until(lambda: len(c.engine.requests) == 2)
        await c.until(lambda: not c.conversation.active)
        assert [m.text for m in c.conversation.messages] == ["Why?", "New answer."]
        assert [m["role"] for m in c.engine.requests[1].messages] == ["user"]
        await c.until(lambda: "New answer." in c.screen() and "Old answer." not in c.screen())
        saved = store.load(c.conversation.session)
        await c.until(lambda: store.load(c.conversation.session).messages[1].text == "New answer.")
        assert saved is not None and len(saved.messages) == 2


async def test_edit_and_resend_drops_what_came_after(chat) -> None:
    async with chat(ScriptedEngine(["A1.", "A2.", "A3."])) as c:
        await c.say("Q1")
        await c.say("Q2")
        c.pane.prompt.put("kept draft")
        first = c.pane.views[0]
        first.focus()
        await c.press("e")
        await c.until(lambda: c.pane.prompt.text == "Q1")
        await c.until(lambda: "Editing" in c.screen())
        await c.press("escape")
        assert c.pane.prompt.text == "kept draft", "Esc leaves everything as it was"
        assert len(c.conversation.messages) == 4
        first.focus()
        await c.press("e")
        await c.until(lambda: c.pane.prompt.text == "Q1")
        c.pane.prompt.put("Q1 better")
        await c.press("enter")
        await c.until(lambda: len(c.engine.requests) == 3 and not c.conversation.active)
        assert [m.text for m in c.conversation.messages] == ["Q1 better", "A3."]
        await c.until(lambda: [m.message for m in c.pane.views] == c.conversation.messages)


async def test_copy_takes_the_message_or_its_code_blocks_in_turn(chat) -> None:
    text = "x\n```py\none()\n```\ny\n```sh\ntwo\n```\n"
    async with chat(ScriptedEngine([text]), environ={"PATH": "", "SSH_TTY": "x"}) as c:
        await c.say("code")
        c.pane.views[1].focus()
        await c.press("c")
        await c.until(lambda: c.app.clipboard == c.conversation.messages[1].text)
        await c.press("y")
        await c.until(lambda: c.app.clipboard == "one()")
        await c.press("y")
        await c.until(lambda: c.app.clipboard == "two")
        await c.until(lambda: c.told("code block 2 of 2"))


async def test_an_empty_reply_is_not_said_to_be_copied(chat) -> None:
    engine = ScriptedEngine()
    engine.hold = True
    async with chat(engine) as c:
        await c.say("Go", wait=False)
        c.app.chat.action_copy_reply()
        await c.until(lambda: c.told("Nothing to copy"))
        assert not c.told("0 characters")


async def test_a_notice_never_hides_what_is_being_typed(chat) -> None:
    for size in ((80, 24), (120, 40)):
        async with chat(size=size) as c:
            c.app.notify("Press Ctrl+C again to quit.")
            toast = await c.until(lambda: next(iter(c.app.screen.query("Toast")), None))
            await c.until(lambda toast=toast: toast.region)
            assert not toast.region.overlaps(c.pane.prompt.region)
            assert toast.region.right <= size[0] and toast.region.y >= 1


async def test_a_thought_is_shown_apart_and_folded(chat) -> None:
    async with chat(ScriptedEngine(["<think>\nsecret plan\n</think>\n\nThe answer."])) as c:
        await c.say("Think")
        await c.until(lambda: "The answer." in c.screen())
        await c.until(lambda: "▸ Thought (2 words)" in c.screen())
        assert "secret plan" not in c.screen()
        c.pane.views[1].focus()
        await c.press("t")
        await c.until(lambda: "secret plan" in c.screen())
        await c.say("Go on")
        sent = [m["content"] for m in c.engine.requests[-1].messages]
        assert "<think>\nsecret plan\n</think>\n\nThe answer." in sent, "history keeps the thought"


async def test_a_turn_is_saved_before_anything_is_generated(chat) -> None:
    store = SessionStore(None)

    class Checking(ScriptedEngine):
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
    engine = ScriptedEngine(["word " * 300])
    async with chat(engine, store=store) as c:
        await c.say("Go", wait=False)
        await c.until(lambda: len(c.conversation.messages[1].text) > 30)
        engine.hold = True
        await c.pilot.pause()
        text = c.conversation.messages[1].text
        await c.until(
            lambda: store.load(c.conversation.session).messages[1].text == text, "the save", 5
        )


async def test_an_engine_failure_is_one_line_and_the_chat_goes_on(chat) -> None:
    from scripted import finished

    from dspark_mlx.events import Failed

    engine = ScriptedEngine()
    engine.hold = True
    async with chat(engine) as c:
        await c.say("One", wait=False)
        engine.emit(
            finished(engine.requests[0].id, "error", message="out of memory", hint="close programs")
        )
        await c.until(lambda: "out of memory (close programs)" in c.screen())
        engine.emit(Failed("the model's file is gone", "load it again with F5"))
        await c.until(lambda: c.told("load it again with F5"))
        await c.until(lambda: "the model's file is gone" in c.screen())
        engine.hold = False
        await c.say("Two")
        assert c.conversation.messages[-1].state == "done"
        engine.broken = RuntimeError("engine thread died")
        await c.until(lambda: "engine thread died" in c.screen())
        assert c.app.is_running


async def test_a_first_prompt_from_the_command_line_is_sent(chat) -> None:
    async with chat(prompt="Hello there") as c:
        await c.until(lambda: c.engine.requests)
        assert c.engine.requests[0].messages[-1]["content"] == "Hello there"


async def test_a_saved_chat_is_resumed_with_its_figures_and_can_go_on(chat) -> None:
    store = SessionStore(None)
    async with chat(ScriptedEngine(["Answer one."]), store=store) as c:
        await c.say("Question one")
        session = c.conversation.session
        await c.until(lambda: store.load(session).messages[1].state == "done")
        await c.press("ctrl+n")
        await c.until(lambda: len(c.app.chat.panes) == 2)
        await c.press("f7", "f9")
        await c.until(lambda: len(c.app.chat.panes) == 1)
        await c.app.chat.open(store.load(session))
        await c.until(lambda: "Answer one." in c.screen())
        await c.until(lambda: "5 tokens" in c.screen(), "the figures")
        assert c.conversation.session == session
        await c.say("Question two")
        assert [m["role"] for m in c.engine.requests[-1].messages] == ["user", "assistant", "user"]
        assert len(store.entries()) == 1
