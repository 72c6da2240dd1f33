"""Fixtures of the chat's tests: an app on a scripted engine, and waiting without sleeping."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # scripted.py and make_trace.py

from scripted import ScriptedEngine

from tui.app import ChatApp, StartOptions
from tui.engine_client import EngineClient
from tui.session_store import SessionStore
from tui.settings import Preferences, SettingsFile


class Chat:
    """A running app with its pilot, engine and store."""

    def __init__(self, app: ChatApp, pilot: Any) -> None:
        self.app, self.pilot = app, pilot
        self.engine: Any = app.engine.engine
        self.store = app.store

    @property
    def pane(self) -> Any:
        return self.app.chat.pane

    @property
    def conversation(self) -> Any:
        return self.pane.conversation

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def until(self, condition: Callable[[], Any], what: str = "", seconds: float = 20) -> Any:
        """Wait until ``condition`` holds; fails with ``what`` after ``seconds``."""
        end = time.monotonic() + seconds
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() > end:
                pytest.fail(f"waited in vain for {what or condition}\n{self.screen()}")
            await self.pilot.pause(0.02)

    async def say(self, text: str, wait: bool = True) -> None:
        """Put text into the prompt and send it; waits for the reply to end."""
        self.pane.prompt.put(text)
        self.pane.prompt.focus()
        count = len(self.conversation.messages)
        await self.press("enter")
        await self.until(lambda: len(self.conversation.messages) >= count + 2, "the turn")
        if wait:
            await self.until(lambda: not self.conversation.active, "the reply's end")
            await self.settled()

    async def settled(self) -> None:
        """Wait until all Markdown is on the screen."""
        for body in self.app.chat.query(".answer"):
            await body.settle()  # type: ignore[attr-defined]
        await self.pilot.pause()

    def told(self, text: str) -> bool:
        """Whether a notice on the screen says ``text``; its line breaks do not matter."""
        return any(text in notice.message for notice in self.app._notifications)

    def screen(self) -> str:
        """What the terminal shows, as text."""
        width, height = self.app.size
        strips = self.app.screen._compositor.render_strips(self.app.size)
        return "\n".join(strip.text[:width].rstrip() for strip in strips[:height])


@asynccontextmanager
async def open_chat(
    engine: Any = None,
    *,
    size: tuple[int, int] = (100, 34),
    store: SessionStore | None = None,
    settings: Path | None = None,
    environ: dict[str, str] | None = None,
    wait: bool = True,
    pinned: dict[str, Any] | None = None,
    **start: Any,
) -> AsyncIterator[Chat]:
    pinned = {"model": "smollm2-135m"} | (pinned or {})
    app = ChatApp(
        EngineClient(engine or ScriptedEngine()),
        store or SessionStore(None),
        Preferences(SettingsFile(settings), pinned),
        StartOptions(**start),
        environ=environ or {"PATH": ""},
    )
    async with app.run_test(size=size, notifications=True) as pilot:
        chat = Chat(app, pilot)
        if wait:
            await chat.until(lambda: app.stats.loaded or app.stats.failure, "the model")
            await pilot.pause()
        yield chat


@pytest.fixture
def chat() -> Callable[..., Any]:
    return open_chat


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's own files."""
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)


async def run_soon(work: Awaitable[Any], seconds: float = 20) -> Any:
    return await asyncio.wait_for(work, seconds)
