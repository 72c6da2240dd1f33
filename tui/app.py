"""The chat application: its start and end, the engine's events, models and settings.

The app owns what all screens share and knows the screens; no screen knows the app. They are given
what they need and post messages. Events are fetched on a timer, never pushed by another thread.
Screens other than the chat are imported when they are first opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from textual import on
from textual.binding import Binding
from textual.driver import Driver

from dspark_mlx.errors import DsparkError
from dspark_mlx.events import Failed, Loaded, Notice
from dspark_mlx.registry import DEFAULT_MODEL, Registry
from dspark_mlx.stats import EngineStats

from . import clipboard, paths, textual_patches, themes
from .engine_client import EngineClient
from .palette import ChatCommands
from .screens.chat_screen import ChatScreen
from .session_store import SessionStore
from .settings import Preferences, Settings
from .textual_patches.lifecycle import LifecycleApp
from .widgets.chart import Painted
from .widgets.message_view import MessageView
from .widgets.prompt_box import PromptBox

TICK_SECONDS = 1 / 12  # between two looks at the engine's events
_QUIT_SECONDS = 4.0  # within which a second Ctrl+C quits


@dataclass(frozen=True, slots=True)
class StartOptions:
    """What the command line asked for: a first message, a saved session to open."""

    prompt: str = ""
    session: int | None = None


class ChatApp(LifecycleApp):
    CSS_PATH = "app.tcss"
    TITLE = "dspark-chat"
    COMMANDS: ClassVar = {ChatCommands}
    COMMAND_PALETTE_DISPLAY = "^p"
    BINDINGS: ClassVar = [
        Binding(
            "ctrl+c", "interrupt", "Stop or quit", id="app.interrupt", show=False, priority=True
        ),
        Binding("ctrl+q", "quit", "Quit", id="app.quit", show=False, priority=True),
    ]

    def __init__(
        self,
        engine: EngineClient,
        store: SessionStore,
        preferences: Preferences,
        start: StartOptions | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.engine, self.store, self.preferences = engine, store, preferences
        self.stats = EngineStats()
        self.environ = os.environ if environ is None else environ
        self.chat = ChatScreen(engine, self.stats, store, preferences)
        self.crash = ""  # the line to print after a crash
        self.leaving = False
        self._start = start or StartOptions()
        self._interrupted = -_QUIT_SECONDS
        self._chosen_model = ""  # becomes the default once it has loaded
        self._load_next: str | None = None  # a model that waits for the replies to end
        self.register_theme(themes.DARK)
        self.register_theme(themes.LIGHT)
        self.theme = self._theme_name(preferences.now.theme)

    def get_driver_class(self) -> type[Driver]:
        return textual_patches.driver_class(super().get_driver_class())

    def get_default_screen(self) -> ChatScreen:
        return self.chat

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return themes.chart_colours(self.current_theme.dark, self.no_color)

    def _theme_name(self, wanted: str) -> str:
        return wanted if wanted in self.available_themes else themes.preferred(self.environ)

    # Start and end

    def on_mount(self) -> None:
        for name in ("SIGTERM", "SIGHUP"):
            # Not in a thread (tests), not on every system.
            with contextlib.suppress(RuntimeError, ValueError, NotImplementedError, AttributeError):
                asyncio.get_running_loop().add_signal_handler(getattr(signal, name), self.exit)
        self.set_keymap(dict(self.preferences.now.keys))
        self.call_after_refresh(self._begin)

    async def _begin(self) -> None:
        """After the first paint: read the history, load the model, send the first message."""
        self.chat.inputs.extend(self.store.inputs())
        for problem in (self.store.problem, *self.preferences.file.problems):
            if problem:
                self.notify(problem, severity="warning", markup=False, timeout=10)
        await self.chat.open_session(self._start.session)
        self.set_interval(TICK_SECONDS, self.tick)
        self._first_load()
        self.engine.release()
        if self._start.prompt and self.engine.wanted:
            await self.chat.ask(self.chat.pane, self._start.prompt)
        elif self._start.prompt:  # kept until there is a model to ask
            self.chat.pane.prompt.put(self._start.prompt)

    def _first_load(self) -> None:
        """Load the chosen model, or the default if it is on disk; else offer the choice."""
        model = self.preferences.now.model
        if not model and self.engine.replay is None:
            from .screens.model_picker import on_disk

            try:
                here = on_disk(Registry.load().resolve(DEFAULT_MODEL), drafter=False)
            except DsparkError as error:
                self.notify(str(error), severity="error", markup=False)
                return
            if not here:
                self.action_models(first=True)
                return
            model = DEFAULT_MODEL
        self.load(model)

    def exit(self, *values: Any, **named: Any) -> None:
        self.before_shutdown()
        super().exit(*values, **named)

    def before_shutdown(self) -> None:
        if not self.leaving:
            self.leaving = True
            with contextlib.suppress(Exception):  # nothing may keep the app from ending
                self.chat.save_now()

    def crashed(self, report: str) -> None:
        self.crash = paths.log_crash(report)

    async def on_unmount(self) -> None:
        await asyncio.to_thread(self.engine.close)
        self.store.close()

    # The engine

    async def tick(self) -> None:
        """Fetch the engine's events, bring the chat up to them, paint what is due."""
        if self.leaving:
            return
        events = self.engine.drain()
        for event in events:
            self.stats.apply(event)
            if isinstance(event, Loaded) and self._chosen_model == self.engine.wanted:
                self.change(model=self._chosen_model)  # for the next start, too
                self._chosen_model = ""
            if isinstance(event, Failed):
                text = f"{event.message}\n{event.hint}" if event.hint else event.message
                self.notify(text, severity="error", title="Engine", markup=False, timeout=15)
            elif isinstance(event, Notice):
                self.notify(event.message, markup=False)
        if self._load_next is not None and not self.stats.active:
            model, self._load_next = self._load_next, None
            self.load(model)  # asked for once: it may have gone since it was chosen
        try:
            if events:
                await self.chat.handle_events(events)
            if isinstance(self.screen, Painted):
                self.screen.tick(news=bool(events))
        except Exception:
            if not self.leaving:  # else the screen is being taken down meanwhile
                raise

    def load(self, model: str) -> bool:
        """Load ``model`` once no reply is being written; returns False if it is unknown."""
        later = bool(self.stats.loaded and self.stats.active and not self.stats.loading)
        try:
            if later:
                self.engine.check(model)
            else:
                self.engine.load(model, self.preferences.now)
                self.stats.failure = None
        except DsparkError as error:
            if not later:
                self.stats.apply(Failed(error.message, error.hint))
            self.notify(str(error), severity="error", markup=False, timeout=15)
            return False
        finally:
            self.chat.update_tabs()
        self._load_next = model if later else None
        if later:
            self.notify("Takes effect when the reply has ended. Esc on the chat ends it now.")
        return True

    # Settings

    def change(self, **values: Any) -> None:
        """Change settings for now and for the next start, and have the change take effect."""
        before = self.preferences.now
        try:
            self.preferences.change(**values)
        except OSError as error:
            self.notify(f"Settings not saved: {error}", severity="warning", markup=False)
        now = self.preferences.now
        if before.theme != now.theme:
            self.theme = self._theme_name(now.theme)
        if before.keys != now.keys:
            self.set_keymap(dict(now.keys))
        if before.schedule != now.schedule and self.stats.loaded:
            self.engine.set_policy(now.schedule)
        self.chat.show_settings()

    @on(ChatScreen.SettingsWanted)
    def settings_wanted(self, event: ChatScreen.SettingsWanted) -> None:
        self.change(**event.values)

    def action_set_theme(self, name: str) -> None:
        self.change(theme=name)

    # Actions

    def action_interrupt(self) -> None:
        """Ctrl+C: stop the reply; else copy a selection; else ask; else quit."""
        if self.chat.stop():
            self._interrupted = -_QUIT_SECONDS
            return
        if selected := self.screen.get_selected_text():
            self.copy(selected, "selection")
            self.screen.clear_selection()
            return
        now = time.monotonic()
        if now - self._interrupted < _QUIT_SECONDS:
            self.exit()
            return
        self._interrupted = now
        self.notify("Press Ctrl+C again to quit.", timeout=_QUIT_SECONDS)

    @on(MessageView.CopyWanted)
    def copy_wanted(self, event: MessageView.CopyWanted) -> None:
        self.copy(event.text, event.what)

    def copy(self, text: str, what: str) -> None:
        if not text:
            return self.notify(f"Nothing to copy: the {what} is empty.")

        async def work() -> None:
            osc52 = partial(self.call_from_thread, self.copy_to_clipboard)
            how = await asyncio.to_thread(clipboard.copy, text, osc52, self.environ)
            self.notify(f"{how}: {what} ({len(text):,} characters)", markup=False)

        self.run_worker(work(), group="copy")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "replay":
            return self.engine.replay is not None
        return super().check_action(action, parameters)

    def action_replay(self, what: str) -> None:
        """Pause a recording, play it ``faster`` or ``slower``, or ``restart`` it."""
        if self.engine.replay is not None:
            self.notify(f"Recording: {self.engine.replay.control(what)}")

    # Screens

    def action_monitor(self) -> None:
        from .screens.monitor import MonitorScreen

        self.push_screen(MonitorScreen(self.stats))

    def action_models(self, first: bool = False) -> None:
        """The model picker; the chosen model is loaded. ``first``: there is no model yet."""
        from .screens.model_picker import ModelPicker

        def chosen(model: str | None) -> None:
            if model and self.engine.replay is not None:
                self.notify("A recording plays without a model.")
            elif model and self.load(model):
                self._chosen_model = model

        self.push_screen(ModelPicker(self.engine.wanted, first), chosen)

    def action_settings(self) -> None:
        """The settings form; what changed is kept and takes effect, if need be by a load."""
        from .screens.settings_form import SettingsForm

        def done(wanted: Settings | None) -> None:
            if wanted is None:
                return
            now = self.preferences.now
            names = [field.name for field in dataclasses.fields(wanted)]
            values = {name: getattr(wanted, name) for name in names}
            self.change(**{n: value for n, value in values.items() if value != getattr(now, n)})
            if self.engine.needs_load(wanted):
                self.load(wanted.model or DEFAULT_MODEL)

        actions = sorted(action for _, _, action in self._keys())
        self.push_screen(
            SettingsForm(self.preferences.now, sorted(self.available_themes), actions), done
        )

    def action_help(self) -> None:
        from .screens.help_page import HelpPage

        self.push_screen(HelpPage(self._keys()))

    def _keys(self) -> list[tuple[str, str, str]]:
        """Every binding that can be set: its key now, what it does, its name in the settings."""
        from .screens.monitor import MonitorScreen

        keys = self.preferences.now.keys
        return [
            (keys.get(binding.id, binding.key), binding.tooltip or binding.description, binding.id)
            for owner in (PromptBox, ChatScreen, ChatApp, MessageView, MonitorScreen)
            for binding in owner.BINDINGS
            if isinstance(binding, Binding) and binding.id
        ]
