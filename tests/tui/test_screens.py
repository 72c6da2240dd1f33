"""The screens around the chat: sessions, models, settings, help, palette, dialogs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from make_trace import make
from scripted import ScriptedEngine
from textual.command import CommandPalette
from textual.widgets import Input, OptionList, Select, Static, Switch, TextArea

from dspark_mlx.events import Failed, Loaded, Loading
from tui.replay import ReplayEngine
from tui.screens.dialogs import AskText, Confirm
from tui.screens.help_page import HelpPage, key_table
from tui.screens.model_picker import ModelPicker
from tui.screens.session_list import SessionList
from tui.screens.settings_form import SettingsForm
from tui.session_store import SessionStore
from tui.settings import SettingsFile
from tui.widgets.markdown import GrowingMarkdown


async def opened(c, kind):
    """Wait until a screen of ``kind`` is on top and painted."""
    await c.until(lambda: isinstance(c.app.screen, kind) and c.app.screen.is_mounted, kind.__name__)
    await c.pilot.pause()
    return c.app.screen


async def test_sessions_are_listed_searched_resumed_renamed_exported_deleted(
    chat, tmp_path: Path
) -> None:
    store = SessionStore(None)
    async with chat(ScriptedEngine(["About whales.", "About [ants]."]), store=store) as c:
        await c.say("Whales?")
        await c.press("ctrl+n")
        await c.until(lambda: len(c.app.chat.panes) == 2)
        await c.say("Ants?")
        await c.press("ctrl+o")
        screen = await opened(c, SessionList)
        options = screen.query_one(OptionList)
        await c.until(lambda: options.option_count == 2)
        await c.until(lambda: "Ants?" in c.screen() and "2 messages" in c.screen())
        await c.press("slash", *"whal")
        await c.until(lambda: options.option_count == 1)
        await c.until(lambda: "… Whales?" in c.screen(), "where the search matched")
        await c.press("enter", "r")
        await opened(c, AskText)
        c.app.screen.query_one(Input).value = "Big [b]animals"
        await c.press("enter")
        await opened(c, SessionList)
        await c.until(lambda: any(entry.title == "Big [b]animals" for entry in store.entries()))
        screen.query_one(Input).value = ""
        await c.until(lambda: options.option_count == 2)
        options.focus()
        await c.press("m", "j")
        await c.until(lambda: len(list(tmp_path.glob("*.md")) + list(tmp_path.glob("*.json"))) == 2)
        data = json.loads(next(tmp_path.glob("*.json")).read_text())
        assert data["messages"][0]["content"] in ("Ants?", "Whales?")
        await c.press("enter")
        await c.until(lambda: not isinstance(c.app.screen, SessionList))
        await c.press("ctrl+o")
        await opened(c, SessionList)
        await c.press("d")
        await opened(c, Confirm)
        await c.press("n")
        await opened(c, SessionList)
        assert len(store.entries()) == 2, "No keeps it"
        await c.press("d")
        await opened(c, Confirm)
        await c.press("y")
        await c.until(lambda: len(store.entries()) == 1)
        await c.press("escape")
        left = store.entries()[0].session
        await c.until(lambda: {p.conversation.session for p in c.app.chat.panes} <= {left, None})


async def test_a_session_opened_twice_has_one_tab(chat) -> None:
    store = SessionStore(None)
    async with chat(store=store) as c:
        await c.say("One")
        session = c.conversation.session
        await c.app.chat.open(store.load(session))
        assert len(c.app.chat.panes) == 1


async def test_the_picker_says_size_fit_and_place_and_keeps_the_draft(chat) -> None:
    engine = ScriptedEngine()
    async with chat(engine) as c:
        c.pane.prompt.put("my draft")
        await c.press("f5")
        screen = await opened(c, ModelPicker)
        for word in ("smollm2-135m", "MB", "fits", "to download", "drafter"):
            await c.until(lambda word=word: word in c.screen(), word)
        screen.query_one(Input).focus()
        screen.query_one(Input).value = "org/some-model"
        await c.press("enter")
        await c.until(lambda: ("load", "org/some-model", "auto", "auto", {}) in engine.calls)
        assert c.pane.prompt.text == "my draft"
        assert c.app.preferences.now.model == "org/some-model"


async def test_a_download_shows_progress_and_can_be_cancelled(chat) -> None:
    engine = ScriptedEngine(auto_load=False)
    async with chat(engine, wait=False) as c:
        await c.until(lambda: engine.calls)
        engine.emit(Loading("download", 49_000_000, 98_000_000, "smollm2-135m"))
        await c.until(lambda: "fetching smollm2-135m 50% of 98.0 MB" in c.screen())
        await c.press("escape")
        await c.until(lambda: ("cancel_load",) in engine.calls)
        engine.emit(Failed("the download was cancelled", "choose a model with F5"))
        await c.until(lambda: "the download was cancelled" in c.screen())
        await c.until(lambda: "fetching" not in c.screen())
        assert c.app.is_running


async def test_the_first_start_offers_the_default_model_without_configuration(
    chat, monkeypatch
) -> None:
    engine = ScriptedEngine()
    async with chat(engine, wait=False, pinned={"model": ""}) as c:
        screen = await opened(c, ModelPicker)
        await c.until(lambda: "Nothing is set up yet" in c.screen())
        assert screen.query_one(OptionList).highlighted == 0
        assert engine.calls == [], "nothing is downloaded unasked"
        await c.press("enter")
        await c.until(lambda: engine.calls and engine.calls[0][:2] == ("load", "smollm2-135m"))


async def test_a_first_prompt_waits_in_the_box_until_there_is_a_model(chat) -> None:
    async with chat(wait=False, pinned={"model": ""}, prompt="Why?") as c:
        await opened(c, ModelPicker)
        await c.until(lambda: c.pane.prompt.text == "Why?")
        assert c.engine.requests == []


async def test_an_unknown_model_is_one_line_and_the_chat_goes_on(chat) -> None:
    async with chat(pinned={"model": "smollm3"}) as c:
        await c.until(lambda: c.told("no model named 'smollm3'"))
        assert c.engine.calls == []
        await c.press(*"still")
        assert c.pane.prompt.text == "still"


async def test_a_model_that_is_not_there_is_not_kept_for_the_next_start(chat, tmp_path) -> None:
    path = tmp_path / "settings.toml"

    async def choose(name: str) -> None:
        await c.press("f5")
        (await opened(c, ModelPicker)).dismiss(name)

    async with chat(settings=path) as c:
        await choose("/no/such/folder")
        await c.until(lambda: c.told("there is no folder /no/such/folder"))
        await c.pilot.pause()
        assert SettingsFile(path).load().model == ""
        await choose("qwen3-4b")
        await c.until(lambda: SettingsFile(path).load().model == "qwen3-4b")


async def test_choosing_a_model_leaves_a_recording_as_it_plays(chat, tmp_path) -> None:
    path = tmp_path / "settings.toml"
    async with chat(ReplayEngine(make(1, 60), play=False), settings=path) as c:
        await c.press("f5")
        screen = await opened(c, ModelPicker)
        screen.dismiss("qwen3-4b")
        await c.until(lambda: c.told("plays without a model"))
        assert SettingsFile(path).load().model == "" and len(c.app.chat.panes) == 1


async def test_switching_the_model_while_chatting_keeps_the_conversation(chat) -> None:
    engine = ScriptedEngine()
    async with chat(engine) as c:
        await c.say("One")
        engine.emit(Loaded("other", None, "lookup", "no drafter", "auto", 8, 4096, 5, 10.0))
        await c.until(lambda: "other · lookup" in c.screen())
        await c.say("Two")
        assert len(engine.requests[-1].messages) == 3


async def test_another_model_waits_for_the_reply_being_written(chat, tmp_path: Path) -> None:
    path = tmp_path / "chat.toml"
    engine = ScriptedEngine(["word " * 60])
    engine.hold_after = 2
    async with chat(engine, settings=path) as c:
        await c.say("One", wait=False)
        await c.until(lambda: c.conversation.messages[1].text)
        await c.press("f5")
        (await opened(c, ModelPicker)).dismiss("no-such-model")
        await c.until(lambda: c.told("no model named 'no-such-model'"))
        assert SettingsFile(path).load().model == ""
        await c.press("f5")
        (await opened(c, ModelPicker)).dismiss("qwen3-4b")
        await c.until(lambda: c.told("Takes effect when the reply has ended."))
        await c.pilot.pause(0.3)
        assert [call[1] for call in engine.calls if call[0] == "load"] == ["smollm2-135m"]
        engine.hold = False
        await c.until(lambda: not c.conversation.active)
        await c.until(lambda: ("qwen3-4b") in [k[1] for k in engine.calls if k[0] == "load"])
        assert c.conversation.messages[1].text.split() == ["word"] * 60, "it was not cut short"
        assert c.conversation.messages[1].state == "done"
        await c.until(lambda: SettingsFile(path).load().model == "qwen3-4b")


async def test_a_model_that_cannot_be_had_is_not_kept(chat, tmp_path: Path) -> None:
    path = tmp_path / "chat.toml"
    engine = ScriptedEngine(["hello"])
    async with chat(engine, settings=path) as c:
        await c.say("One")
        engine.load = lambda *args, **options: engine.emit(Failed("no network"))  # type: ignore[method-assign]
        await c.press("f5")
        (await opened(c, ModelPicker)).dismiss("qwen3-4b")
        await c.until(lambda: c.told("no network"))
        assert SettingsFile(path).load().model == ""
        await c.say("Two")
        assert c.conversation.messages[-1].state == "done"
        assert "no network" not in c.screen().splitlines()[0], "the model from before is at work"


async def test_the_choices_of_a_setting_are_all_shown(chat) -> None:
    async with chat() as c:
        await c.press("ctrl+s")
        screen = await opened(c, SettingsForm)
        screen.query_one("#method", Select).focus()
        await c.press("enter")
        await c.until(lambda: all(name in c.screen() for name in ("auto", "lookup", "none")))
        assert "temperature" in c.screen(), "the form below it is still there"


async def test_the_header_says_the_schedule_in_use(chat) -> None:
    async with chat() as c:
        await c.until(lambda: c.app.stats.loaded)
        c.app.change(schedule="fixed", method="lookup")
        await c.until(lambda: "· lookup · fixed" in c.screen().splitlines()[0])


async def test_settings_are_checked_kept_and_used(chat, tmp_path: Path) -> None:
    path = tmp_path / "chat.toml"
    async with chat(settings=path) as c:
        await c.press("ctrl+s")
        screen = await opened(c, SettingsForm)
        screen.query_one("#temperature", Input).value = "hot"
        await c.press("ctrl+s")
        wrong = screen.query_one(".wrong", Static)
        await c.until(lambda: "temperature must be a number" in str(wrong.visual))
        screen.query_one("#temperature", Input).value = "0.7"
        screen.query_one("#top_k", Input).value = "40"
        screen.query_one("#seed", Input).value = "5"
        screen.query_one("#schedule", Select).value = "fixed"
        screen.query_one("#live_panel", Switch).value = False
        screen.query_one("#keys", TextArea).text = "chat.monitor = ctrl+b\n"
        await c.press("ctrl+s")
        await c.until(lambda: not isinstance(c.app.screen, SettingsForm))
        await c.until(lambda: ("set_policy", "fixed") in c.engine.calls)
        kept = SettingsFile(path).load()
        assert (kept.temperature, kept.top_k, kept.seed) == (0.7, 40, 5)
        assert kept.schedule == "fixed" and not kept.live_panel
        await c.say("Go")
        assert c.engine.requests[0].sampling.temperature == 0.7
        await c.press("ctrl+b")
        await c.until(lambda: type(c.app.screen).__name__ == "MonitorScreen", "the new key")


async def test_a_key_for_an_unknown_action_is_refused(chat) -> None:
    async with chat() as c:
        await c.press("ctrl+s")
        screen = await opened(c, SettingsForm)
        screen.query_one("#keys", TextArea).text = "fly = ctrl+b"
        await c.press("ctrl+s")
        wrong = screen.query_one(".wrong", Static)
        await c.until(lambda: "known action" in str(wrong.visual))
        await c.press("escape")


async def test_flags_are_for_this_time_only(chat, tmp_path: Path) -> None:
    path = tmp_path / "chat.toml"
    async with chat(settings=path, pinned={"temperature": 0.9}) as c:
        await c.press("ctrl+t")
        await c.until(lambda: SettingsFile(path).load().token_colours)
        assert SettingsFile(path).load().temperature == 0.0
        await c.say("Go")
        assert c.engine.requests[0].sampling.temperature == 0.9


async def test_a_theme_is_chosen_in_the_palette_and_kept(chat, tmp_path: Path) -> None:
    path = tmp_path / "chat.toml"
    async with chat(settings=path) as c:
        await c.press("ctrl+p")
        await opened(c, CommandPalette)
        await c.press(*"dspark-light")
        await c.until(lambda: "Theme: dspark-light" in c.screen())
        await c.press("enter")
        await c.until(lambda: c.app.theme == "dspark-light")
        assert SettingsFile(path).load().theme == "dspark-light"


async def test_everything_is_in_the_command_palette(chat) -> None:
    from tui.palette import ChatCommands

    async with chat() as c:
        provider = ChatCommands(c.app.screen)
        titles = " | ".join(title for title, _, _ in provider.commands())
        for word in ("New chat", "Chats", "Side by side", "Stop", "again", "Copy the reply",
                     "Copy code", "Rename", "System prompt", "Markdown", "JSON", "Colour tokens",
                     "Live panel", "Monitor", "Models", "Settings", "Theme", "Help",
                     "Quit"):  # fmt: skip
            assert word in titles, word
        for _, _, action in provider.commands():
            where, _, name = action.partition("(")[0].partition(".")
            owner = c.app if where == "app" else c.app.chat
            assert callable(getattr(owner, f"action_{name}")), action


async def test_help_lists_the_keys_and_how_to_read_the_view(chat) -> None:
    async with chat(size=(100, 60)) as c:
        await c.press("f1")
        screen = await opened(c, HelpPage)
        await c.until(lambda: "Ctrl+T" in c.screen())
        lines = str(screen.query_one(".keys", Static).visual).splitlines()
        assert any(line.split() == ["Ctrl+T", "colour", "tokens", "by", "origin", "chat.tokens"]
                   for line in lines)  # fmt: skip
        assert "Draft strip" in screen.query_one(GrowingMarkdown).source
        await c.press("escape")
        await c.until(lambda: not isinstance(c.app.screen, HelpPage))


async def test_help_has_a_line_for_each_key_on_a_small_terminal(chat) -> None:
    async with chat(size=(80, 24)) as c:
        await c.press("f1")
        screen = await opened(c, HelpPage)
        table = screen.query_one(".keys", Static)
        await c.until(lambda: table.content_size.height)
        lines = str(table.visual).splitlines()
        assert table.content_size.height == len(lines), max(lines, key=len)


def test_every_key_is_told_in_words_and_shown_as_it_is_bound_now() -> None:
    table = key_table([("f7,ctrl+pageup", "Previous chat", "chat.previous")])
    assert table.splitlines()[1:] == [
        "F7           previous chat  chat.previous",
        "Ctrl+PageUp",
    ]


async def test_a_system_prompt_is_set_for_one_chat(chat) -> None:
    store = SessionStore(None)
    async with chat(store=store) as c:
        await c.app.run_action("screen.system_prompt")
        screen = await opened(c, AskText)
        screen.query_one(TextArea).text = "Answer in [verse].\nAlways."
        await c.press("ctrl+s")
        await c.until(lambda: c.conversation.system)
        await c.say("Go")
        assert c.engine.requests[0].messages[0]["content"] == "Answer in [verse].\nAlways."
        assert store.load(c.conversation.session).system.startswith("Answer in")


async def test_renaming_and_exporting_this_chat(chat, tmp_path: Path) -> None:
    async with chat() as c:
        await c.say("Go")
        await c.app.run_action("screen.rename")
        screen = await opened(c, AskText)
        screen.query_one(Input).value = "Better title"
        await c.press("enter")
        await c.until(lambda: "Better title" in c.screen())
        await c.app.run_action("screen.export('md')")
        assert (tmp_path / "better-title.md").exists()


async def test_a_folder_that_cannot_be_written_is_told(chat, monkeypatch) -> None:
    from tui import paths

    monkeypatch.setattr(paths, "export_dir", lambda: Path("/proc/none"))
    async with chat() as c:
        await c.say("Go")
        await c.app.run_action("screen.export('md')")
        await c.until(lambda: c.told("Not exported"))


@pytest.mark.parametrize("size", [(80, 24), (40, 12)])
async def test_dialogs_fit_small_terminals(chat, size) -> None:
    async with chat(size=size) as c:
        for key, kind in (("ctrl+o", SessionList), ("f5", ModelPicker),
                          ("ctrl+s", SettingsForm), ("f1", HelpPage)):  # fmt: skip
            await c.press(key)
            await opened(c, kind)
            for _ in range(50):  # a screen still opening takes no notice of the first
                await c.press("escape")
                if not isinstance(c.app.screen, kind):
                    break
            assert not isinstance(c.app.screen, kind)


async def test_a_draft_never_sent_is_there_at_the_next_start(chat) -> None:
    store = SessionStore(None)
    async with chat(store=store) as c:
        c.pane.prompt.put("half a thought")
        await c.until(lambda: store.unsent() is not None, "the draft on disk")
        unsent = store.unsent()
        store.close = lambda: None  # type: ignore[method-assign]  # the next app uses it too
    async with chat(store=store) as c:
        await c.until(lambda: c.pane.prompt.text == "half a thought")
        assert c.conversation.session == unsent


async def test_a_crash_goes_to_the_log_and_one_line_to_the_terminal(chat, tmp_path: Path) -> None:
    app = None
    with pytest.raises(ZeroDivisionError):
        async with chat() as c:
            app = c.app
            c.app.call_later(lambda: 1 / 0)
            await c.until(lambda: app.crash, "the crash")
    assert app is not None and "crashed" in app.crash and "chat.log" in app.crash
    log = next(tmp_path.rglob("chat.log")).read_text()
    assert "ZeroDivisionError" in log


async def test_a_model_that_went_while_it_waited_is_told_once(chat, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    engine = ScriptedEngine(["word " * 60])
    engine.hold_after = 2
    async with chat(engine) as c:
        await c.say("One", wait=False)
        await c.until(lambda: engine.hold)
        assert c.app.load(str(folder))
        (folder / "config.json").unlink()
        folder.rmdir()
        engine.hold = False
        await c.until(lambda: not c.conversation.active)
        await c.until(lambda: c.told("there is no folder"))
        await c.pilot.pause(0.5)
        notices = [n for n in c.app._notifications if "there is no folder" in n.message]
        assert len(notices) == 1
