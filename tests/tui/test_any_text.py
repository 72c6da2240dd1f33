"""Any text whatever is shown as text and crashes nothing, on every screen."""

from __future__ import annotations

import pytest
from scripted import ScriptedEngine

from tui.screens.monitor import MonitorScreen
from tui.screens.session_list import SessionList
from tui.widgets.tokens import TokenText

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


@pytest.mark.parametrize("name", HOSTILE)
async def test_any_text_is_shown_as_text_and_crashes_nothing(chat, name: str) -> None:
    text = HOSTILE[name]
    seen = {
        "markup": ["[red]x[/red]"],
        "tags": ["<script>alert(1)</script>", "List<int>"],
        "rtl": ["שלום"],
        "cjk": ["你好，世界。"],
        "long": ["x" * 60],
        "table": ["[x]"],
    }
    engine = ScriptedEngine([text])
    engine.words = 200
    async with chat(engine, size=(80, 24)) as c:
        await c.say(text if text.strip() else "blank")
        assert c.conversation.messages[-1].text == text

        def clean() -> str:
            screen = c.screen()
            assert "\x1b" not in screen and "\u202e" not in screen
            return screen

        await c.until(lambda: all(part in clean() for part in seen.get(name, ())), "the text")
        await c.press("ctrl+t")
        await c.until(lambda: c.app.chat.query(TokenText) and clean(), "its tokens")
        await c.press("ctrl+g")
        await c.until(lambda: isinstance(c.app.screen, MonitorScreen) and clean())
        await c.press("escape")
        await c.until(lambda: c.app.screen is c.app.chat)
        await c.press("ctrl+o")
        await c.until(lambda: isinstance(c.app.screen, SessionList))
        title = "[red]x" if name == "markup" else "2 messages"
        await c.until(lambda: title in clean(), "titles are text as well")
        await c.press("escape")
        await c.until(lambda: c.app.screen is c.app.chat)
