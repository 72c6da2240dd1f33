"""The chat application: owns backend, store, settings and live state, and beats the pump.

Events are drained on a timer, never pushed by another thread. Screens other
than the chat are imported when first opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from textual.app import App
from textual.binding import Binding
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver

from dspark_mlx.errors import DsparkError
from dspark_mlx.events import Failed, Loaded, Notice
from dspark_mlx.registry import DEFAULT_MODEL, Registry

from . import clipboard, crash, export, opening, paths, themes
from .backend import Backend
from .commands import ChatCommands
from .conversation import Conversation
from .engine import Engine
from .pasting import PasteDriver
from .screens.chat import ChatScreen
from .sessions import SessionStore
from .settings import SettingsFile
from .state import LiveState

BEAT = 1 / 12  # seconds between two looks at the engine's events
_QUIT_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Start:
    """What the command line asked for. ``pinned``: settings given there, not to be kept."""

    prompt: str = ""
    session: int | None = None
    pinned: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class ChatApp(App[None]):
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
        backend: Backend,
        store: SessionStore,
        settings_file: SettingsFile,
        start: Start | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.environ = os.environ if environ is None else environ
        self.live = LiveState()
        super().__init__()
        self.backend, self.store = backend, store
        self.engine = Engine(backend, self.live)
        self.start = start or Start()
        self.settings_file = settings_file
        self._kept = settings_file.load()  # as on disk; settings adds the command line's
        self.settings = dataclasses.replace(self._kept, **self.start.pinned)
        self.inputs: list[str] = []
        self._interrupted = -_QUIT_SECONDS
        self.keep_model = ""  # chosen, and kept once it has loaded
        self._load_next: str | None = None  # a model that waits for replies to end
        self.crash = ""
        self.leaving = False
        self.register_theme(themes.DARK)
        self.register_theme(themes.LIGHT)
        self.theme = self._theme_name(self.settings.theme)

    @property
    def replaying(self) -> bool:
        return self.engine.replay is not None

    @property
    def chat(self) -> ChatScreen:
        return next(screen for screen in self.screen_stack if isinstance(screen, ChatScreen))

    @property
    def model_name(self) -> str:
        return self.live.loaded.model if self.live.loaded else self.engine.wanted

    def get_driver_class(self) -> type[Driver]:
        usual = super().get_driver_class()
        return PasteDriver if usual is LinuxDriver else usual

    def get_default_screen(self) -> ChatScreen:
        return ChatScreen()

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return themes.chart_colours(self.current_theme.dark, self.no_color)

    def _theme_name(self, wanted: str) -> str:
        return wanted if wanted in self.available_themes else themes.preferred(self.environ)

    # Life

    def on_mount(self) -> None:
        for name in ("SIGTERM", "SIGHUP"):
            # Not in a thread (tests), not on every system.
            with contextlib.suppress(RuntimeError, ValueError, NotImplementedError, AttributeError):
                asyncio.get_running_loop().add_signal_handler(getattr(signal, name), self.exit)
        self.set_keymap(dict(self.settings.keys))
        self.call_after_refresh(self._begin)

    async def _begin(self) -> None:
        """After the first paint: read the history, load the model, send the first prompt."""
        self.inputs.extend(self.store.inputs())
        for problem in (self.store.problem, *self.settings_file.problems):
            if problem:
                self.notify(problem, severity="warning", markup=False, timeout=10)
        if self.start.session is not None:
            conversation = self.store.load(self.start.session)
            if conversation is not None:
                await self.chat.open(conversation)
        self._pump_timer = self.set_interval(BEAT, self.pump)
        self.first_load()
        self.engine.release()
        if self.start.prompt and self.engine.wanted:
            await self.chat.turns.ask(self.chat.pane, self.start.prompt)
        elif self.start.prompt:  # kept until there is a model to ask
            self.chat.pane.prompt.put(self.start.prompt)

    def first_load(self) -> None:
        """Load what was chosen, or the default if it is here; else offer the choice."""
        if self.replaying or self.settings.model:
            self.load(self.settings.model)
            return
        try:
            here = self._on_disk(DEFAULT_MODEL)
        except DsparkError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        if here:
            self.load(DEFAULT_MODEL)
        else:
            self.action_models(first=True)

    def _on_disk(self, model: str) -> bool:
        from .screens.models import on_disk

        return on_disk(Registry.load().resolve(model), drafter=False)

    async def _shutdown(self) -> None:
        self.leaving = True  # also where nobody called exit()
        with contextlib.suppress(Exception):
            self.chat.save_now()  # the last second; later there are no panes any more
        await super()._shutdown()

    async def on_unmount(self) -> None:
        await asyncio.to_thread(self.backend.close)
        self.store.close()

    def _fatal_error(self) -> None:
        """A fault of ours: the traceback goes to the log, one line to the terminal."""
        self.crash = crash.note(traceback.format_exc())
        self._close_messages_no_wait()

    # The engine

    async def pump(self) -> None:
        if self.leaving:
            return
        events = self.engine.drain()
        for event in events:
            self.live.apply(event)
            if isinstance(event, Loaded) and self.keep_model == self.engine.wanted:
                self.change(model=self.keep_model)  # for the next start, too
                self.keep_model = ""
            if isinstance(event, Failed):
                text = f"{event.message}\n{event.hint}" if event.hint else event.message
                self.notify(text, severity="error", title="Engine", markup=False, timeout=15)
            elif isinstance(event, Notice):
                self.notify(event.message, markup=False)
        if self._load_next is not None and not self.live.active:
            model, self._load_next = self._load_next, None
            self.load(model)  # once: it may have gone since it was chosen
        try:
            if events:
                await self.chat.take(events)
                self.chat.tell()
            beat = getattr(self.screen, "beat", None)
            if beat is not None:
                beat(news=bool(events))
        except Exception:
            if not self.leaving:  # else the screen is being taken down around us
                raise

    def load(self, model: str) -> bool:
        """Have ``model`` loaded, once no reply is being written; False if none is so named."""
        live = self.live
        later = bool(live.loaded and live.active and not live.loading)
        try:
            if later:
                self.engine.check(model)
            else:
                self.engine.load(model, self.settings)
        except DsparkError as error:
            self.notify(str(error), severity="error", markup=False, timeout=15)
            return False
        finally:
            self.chat.tell()
        self._load_next = model if later else None
        if later:
            self.notify("Takes effect when the reply has ended. Esc on the chat ends it now.")
        return True

    def save(self, conversation: Conversation) -> None:
        """Put the conversation on disk now; a full disk is told and does not stop the chat."""
        try:
            self.store.save(conversation, self.model_name)
        except Exception as error:
            self.notify(f"Not saved: {error}", severity="error", markup=False)

    def exit(self, *values: Any, **named: Any) -> None:
        self.leaving = True
        super().exit(*values, **named)

    # Settings

    def change(self, **values: Any) -> None:
        """Change settings for now and for the next start."""
        before = self.settings
        self.settings = dataclasses.replace(before, **values)
        self._kept = dataclasses.replace(self._kept, **values)
        try:
            self.settings_file.save(self._kept)
        except OSError as error:
            self.notify(f"Settings not saved: {error}", severity="warning", markup=False)
        if before.theme != self.settings.theme:
            self.theme = self._theme_name(self.settings.theme)
        if before.keys != self.settings.keys:
            self.set_keymap(dict(self.settings.keys))
        if before.schedule != self.settings.schedule and self.live.loaded:
            self.backend.set_schedule(self.settings.schedule)
        self.chat.tell()

    # Actions

    def action_interrupt(self) -> None:
        """Ctrl+C: stop the reply; else copy a selection; else ask; else quit."""
        if self.chat.stop():
            self._interrupted = -_QUIT_SECONDS
            return
        if selected := self.screen.get_selected_text():
            self.copy_text(selected, "selection")
            self.screen.clear_selection()
            return
        now = time.monotonic()
        if now - self._interrupted < _QUIT_SECONDS:
            self.exit()
            return
        self._interrupted = now
        self.notify("Press Ctrl+C again to quit.", timeout=_QUIT_SECONDS)

    def copy_text(self, text: str, what: str = "message") -> None:
        if not text:
            return self.notify(f"Nothing to copy: the {what} is empty.")

        async def work() -> None:
            osc52 = partial(self.call_from_thread, self.copy_to_clipboard)
            how = await asyncio.to_thread(clipboard.copy, text, osc52, self.environ)
            self.notify(f"{how}: {what} ({len(text):,} characters)", markup=False)

        self.run_worker(work(), group="copy")

    def action_monitor(self) -> None:
        opening.monitor(self)

    def action_sessions(self) -> None:
        opening.sessions(self)

    def action_models(self, first: bool = False) -> None:
        opening.models(self, first)

    def action_settings(self) -> None:
        opening.settings(self)

    def action_help(self) -> None:
        opening.help_screen(self)

    def action_system_prompt(self) -> None:
        opening.system_prompt(self)

    def action_rename(self) -> None:
        opening.rename(self)

    def action_export(self, kind: str) -> None:
        try:
            path = export.save(self.chat.pane.conversation, paths.export_dir(), kind)
        except OSError as error:
            self.notify(f"Not exported: {error}", severity="error", markup=False)
        else:
            self.notify(f"Exported to {path}", markup=False)

    def action_replay(self, what: str) -> None:
        """Pause a recording, play it ``faster`` or ``slower``, or ``restart`` it."""
        if self.engine.replay is not None:
            self.notify(f"Recording: {self.engine.replay.control(what)}")
