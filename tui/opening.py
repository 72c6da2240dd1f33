"""Opens the other screens, and carries out what was decided there.

A screen is imported when it is first opened: none of them is needed for the
first paint. Each function takes the app whose screen it opens on.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from textual.binding import Binding

from dspark_mlx.registry import DEFAULT_MODEL

from .settings import Settings

if TYPE_CHECKING:
    from .app import ChatApp


def monitor(app: ChatApp) -> None:
    from .screens.monitor import MonitorScreen

    app.push_screen(MonitorScreen(app.live))


def sessions(app: ChatApp) -> None:
    """Earlier chats: the one chosen is opened; renamed and deleted ones change here too."""
    from .screens.sessions import SessionsScreen

    app.chat.save_now()

    async def opened(session: int | None) -> None:
        conversation = app.store.load(session) if session is not None else None
        if conversation is not None:
            await app.chat.open(conversation)

    def gone(session: int) -> None:
        app.run_worker(app.chat.forget_session(session))

    def renamed(session: int, title: str) -> None:
        for conversation in app.chat.sessions_open():
            if conversation.session == session:
                conversation.title = title
        app.chat.tell()

    app.push_screen(SessionsScreen(app.store, gone, renamed), opened)


def models(app: ChatApp, first: bool) -> None:
    """The model picker; the one chosen is loaded, and kept. ``first``: nothing is set up yet."""
    from .screens.models import ModelsScreen

    def chosen(model: str | None) -> None:
        if model and app.replaying:
            app.notify("A recording plays without a model.")
        elif model and app.load(model):
            app.keep_model = model

    app.push_screen(ModelsScreen(app.engine.wanted, first), chosen)


def settings(app: ChatApp) -> None:
    """The settings; what changed is kept and takes effect, with another load where it must."""
    from .screens.settings import SettingsScreen

    async def done(wanted: Settings | None) -> None:
        if wanted is None:
            return
        values = {f.name: getattr(wanted, f.name) for f in dataclasses.fields(wanted)}
        app.change(**{k: v for k, v in values.items() if v != getattr(app.settings, k)})
        app.chat.set_class(wanted.live_panel, "-live")
        for pane in app.chat.panes:
            pane.show_origin(wanted.token_colours)
        if app.engine.must_load(wanted):
            app.load(wanted.model or DEFAULT_MODEL)

    actions = sorted({binding.id or "" for _, binding in _bindings(app)})
    themes_known = sorted(app.available_themes)
    app.push_screen(SettingsScreen(app.settings, themes_known, actions), done)


def help_screen(app: ChatApp) -> None:
    """The keys as they are bound now, and how to read the live view."""
    from .screens.help import HelpScreen

    keys = [
        (key, binding.tooltip or binding.description, binding.id or "")
        for key, binding in _bindings(app)
    ]
    app.push_screen(HelpScreen(keys))


def system_prompt(app: ChatApp) -> None:
    from .screens.dialogs import AskText

    pane = app.chat.pane

    def done(text: str | None) -> None:
        if text is not None:
            pane.conversation.system = text
            if pane.conversation.session is not None:
                app.save(pane.conversation)
            app.notify("System prompt set for this chat.")

    app.push_screen(AskText("System prompt of this chat", pane.conversation.system), done)


def rename(app: ChatApp) -> None:
    from .screens.dialogs import AskLine

    conversation = app.chat.pane.conversation

    def done(title: str | None) -> None:
        if title and title.strip():
            conversation.title = title.strip()
            if conversation.session is not None:
                app.store.rename(conversation.session, conversation.title)
            app.chat.tell()

    app.push_screen(AskLine("Title of this chat", conversation.title), done)


def _bindings(app: ChatApp) -> list[tuple[str, Binding]]:
    """Every binding that can be set, with the key it has now."""
    from .screens.chat import ChatScreen
    from .screens.monitor import MonitorScreen
    from .widgets.message import MessageView
    from .widgets.prompt import Prompt

    found = []
    for owner in (Prompt, ChatScreen, type(app), MessageView, MonitorScreen):
        for binding in owner.BINDINGS:
            if isinstance(binding, Binding) and binding.id:
                found.append((app.settings.keys.get(binding.id, binding.key), binding))
    return found
