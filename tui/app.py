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
from typing import Any, ClassVar

from textual.app import App
from textual.binding import Binding

from dspark_mlx.errors import DsparkError
from dspark_mlx.events import Failed, Notice
from dspark_mlx.registry import DEFAULT_MODEL, Registry
from dspark_mlx.request import Request

from . import clipboard, export, paths, themes
from .backend import LOAD, Backend, ReplayBackend
from .commands import ChatCommands
from .conversation import Conversation
from .screens.chat import ChatScreen
from .sessions import SessionStore
from .settings import Settings, SettingsFile
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
        self.start = start or Start()
        self.settings_file = settings_file
        self._kept = settings_file.load()  # as on disk; settings adds the command line's
        self.settings = dataclasses.replace(self._kept, **self.start.pinned)
        self.inputs: list[str] = []
        self.wanted_model = ""
        self._interrupted = -_QUIT_SECONDS
        self._asked_to_load: tuple[Any, ...] = ()
        self._early: list[Request] | None = []  # None once the first load has been asked for
        self.crash = ""
        self.leaving = False
        self._beat = 0
        self._painted = True
        self.register_theme(themes.DARK)
        self.register_theme(themes.LIGHT)
        self.theme = self._theme_name(self.settings.theme)

    @property
    def replaying(self) -> bool:
        return isinstance(self.replay, ReplayBackend)

    @property
    def replay(self) -> Any:
        """The replay backend, also below a trace; None when an engine runs."""
        inner = getattr(self.backend, "_inner", self.backend)
        return inner if isinstance(inner, ReplayBackend) else None

    @property
    def chat(self) -> ChatScreen:
        return next(screen for screen in self.screen_stack if isinstance(screen, ChatScreen))

    @property
    def model_name(self) -> str:
        return self.live.loaded.model if self.live.loaded else self.wanted_model

    def get_default_screen(self) -> ChatScreen:
        return ChatScreen()

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return themes.chart_colours(self.current_theme.dark)

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
        for problem in (self.store.problem, *self.settings_file.problems):
            if problem:
                self.notify(problem, severity="warning", markup=False, timeout=10)
        self.inputs.extend(self.store.inputs())
        if self.start.session is not None:
            conversation = self.store.load(self.start.session)
            if conversation is not None:
                await self.chat.open(conversation)
        self._pump_timer = self.set_interval(BEAT, self.pump)
        self.first_load()
        early, self._early = self._early or [], None
        for request in early:
            self.backend.submit(request)
        if self.start.prompt and self.wanted_model:
            await self.chat.ask(self.chat.pane, self.start.prompt)
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
        await super()._shutdown()

    async def on_unmount(self) -> None:
        with contextlib.suppress(Exception):
            self.chat.save_now()
        await asyncio.to_thread(self.backend.close)
        self.store.close()

    def _fatal_error(self) -> None:
        """A fault of ours: the traceback goes to the log, one line to the terminal."""
        text = traceback.format_exc()
        try:
            path = paths.log_file()
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as log:
                log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n")
            self.crash = f"dspark-chat: error: the chat crashed; the details are in {path}"
        except OSError:
            self.crash = f"dspark-chat: error: the chat crashed: {text.strip().splitlines()[-1]}"
        self._close_messages_no_wait()

    # The engine

    async def pump(self) -> None:
        if self.leaving:
            return
        try:
            events = self.backend.drain()
        except Exception as error:
            events = [Failed(f"the engine is gone: {error}", "load the model again with F5")]
        if not events and self._painted:
            return
        self._beat += 1
        # The last events before a pause are always painted in full.
        beat = self._beat if events else 0
        self._painted = not events
        for event in events:
            self.live.apply(event)
            if isinstance(event, Failed):
                text = f"{event.message}\n{event.hint}" if event.hint else event.message
                self.notify(text, severity="error", title="Engine", markup=False, timeout=15)
            elif isinstance(event, Notice):
                self.notify(event.message, markup=False)
        try:
            await self.chat.take(events)
            self.chat.tell()
            redraw = getattr(self.screen, "redraw", None)
            if redraw is not None:
                redraw(beat)
        except Exception:
            if not self.leaving:  # else the screen is being taken down around us
                raise

    def load(self, model: str) -> None:
        settings = self.settings
        self.wanted_model = model or "recording"
        self._asked_to_load = (model, settings.drafter, settings.kv_bits)
        try:
            if not self.replaying:
                Registry.load().resolve(model)  # the engine does it too; this answers at once
        except DsparkError as error:
            self.live.apply(Failed(error.message, error.hint))
            self.notify(str(error), severity="error", markup=False, timeout=15)
            self.wanted_model = ""
            self.chat.tell()
            return
        self.live.failure = None
        self.backend.load(
            model, method=settings.method, schedule=settings.schedule, options=settings.options()
        )
        self.chat.tell()

    def cancel_load(self) -> None:
        self.backend.cancel(LOAD)

    def submit(self, request: Request) -> None:
        """Pass a request on; one typed before the first load was asked for waits for that."""
        if self._early is not None:
            self._early.append(request)
        else:
            self.backend.submit(request)

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
        async def work() -> None:
            how = await asyncio.to_thread(
                clipboard.copy,
                text,
                lambda t: self.call_from_thread(self.copy_to_clipboard, t),
                self.environ,
            )
            self.notify(f"{how}: {what} ({len(text):,} characters)", markup=False)

        self.run_worker(work(), group="copy")

    def action_monitor(self) -> None:
        from .screens.monitor import MonitorScreen

        self.push_screen(MonitorScreen(self.live))

    def action_sessions(self) -> None:
        from .screens.sessions import SessionsScreen

        self.chat.save_now()

        async def opened(session: int | None) -> None:
            conversation = self.store.load(session) if session is not None else None
            if conversation is not None:
                await self.chat.open(conversation)

        def gone(session: int) -> None:
            self.run_worker(self.chat.forget_session(session))

        self.push_screen(SessionsScreen(self.store, gone, self._renamed), opened)

    def _renamed(self, session: int, title: str) -> None:
        for conversation in self.chat.sessions_open():
            if conversation.session == session:
                conversation.title = title
        self.chat.tell()

    def action_models(self, first: bool = False) -> None:
        from .screens.models import ModelsScreen

        def chosen(model: str | None) -> None:
            if model:
                self.change(model=model)
                self.load(model)

        self.push_screen(ModelsScreen(self.wanted_model, first), chosen)

    def action_settings(self) -> None:
        from .screens.settings import SettingsScreen

        async def done(settings: Settings | None) -> None:
            if settings is None:
                return
            values = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
            self.change(**{k: v for k, v in values.items() if v != getattr(self.settings, k)})
            chat = self.chat
            chat.set_class(settings.live_panel, "-live")
            for pane in chat.panes:
                pane.show_origin(settings.token_colours)
            needed = (settings.model or DEFAULT_MODEL, settings.drafter, settings.kv_bits)
            if not self.replaying and needed != self._asked_to_load:
                self.load(needed[0])

        actions = sorted({binding.id for _, binding in self._bindings_with_ids()})
        themes_known = sorted(self.available_themes)
        self.push_screen(SettingsScreen(self.settings, themes_known, actions), done)

    def _bindings_with_ids(self) -> list[tuple[str, Any]]:
        from .screens.monitor import MonitorScreen
        from .widgets.message import MessageView
        from .widgets.prompt import Prompt

        found = []
        for owner in (Prompt, ChatScreen, ChatApp, MessageView, MonitorScreen):
            for binding in owner.BINDINGS:
                if isinstance(binding, Binding) and binding.id:
                    key = self.settings.keys.get(binding.id, binding.key)
                    found.append((key, binding))
        return found

    def action_help(self) -> None:
        from .screens.help import HelpScreen

        keys = [
            (key.replace(",", ", "), binding.description, binding.id or "")
            for key, binding in self._bindings_with_ids()
        ]
        self.push_screen(HelpScreen(keys))

    def action_system_prompt(self) -> None:
        from .screens.dialogs import AskText

        pane = self.chat.pane

        def done(text: str | None) -> None:
            if text is not None:
                pane.conversation.system = text
                if pane.conversation.session is not None:
                    self.save(pane.conversation)
                self.notify("System prompt set for this chat.")

        self.push_screen(AskText("System prompt of this chat", pane.conversation.system), done)

    def action_rename(self) -> None:
        from .screens.dialogs import AskLine

        conversation = self.chat.pane.conversation

        def done(title: str | None) -> None:
            if title and title.strip():
                conversation.title = title.strip()
                if conversation.session is not None:
                    self.store.rename(conversation.session, conversation.title)
                self.chat.tell()

        self.push_screen(AskLine("Title of this chat", conversation.title), done)

    def action_export(self, kind: str) -> None:
        try:
            path = export.save(self.chat.pane.conversation, paths.export_dir(), kind)
        except OSError as error:
            self.notify(f"Not exported: {error}", severity="error", markup=False)
        else:
            self.notify(f"Exported to {path}", markup=False)

    def action_replay(self, what: str) -> None:
        """Commands of the replay backend: pause, faster, slower, restart."""
        replay = self.replay
        if replay is None:
            return
        if what == "pause":
            replay.paused = not replay.paused
        elif what == "restart":
            replay.restart()
        else:
            replay.speed *= 2.0 if what == "faster" else 0.5
        state = "paused" if replay.paused else f"{replay.speed:g}× speed"
        self.notify(f"Recording: {state}")
