"""The chat's way to the engine: commands that return at once, and ``drain`` for the events.

Nothing here imports mlx before a model is really loaded, and nothing knows Textual. The engine
behind it is the engine's thread (``dspark_mlx.worker.EngineThread``) or a recording
(``replay.ReplayEngine``), which has the same methods.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from dspark_mlx.errors import DsparkError
from dspark_mlx.events import Event, Failed, Finished, Notice
from dspark_mlx.registry import DEFAULT_MODEL, Registry
from dspark_mlx.request import Request
from dspark_mlx.trace import TraceWriter

from .replay import ReplayEngine
from .settings import Settings


class EngineService(Protocol):
    """Commands in, events out; see ``dspark_mlx.worker.EngineThread``."""

    def load(self, model: str, *, method: Any, schedule: str, options: Mapping[str, Any]) -> None:
        """Load a model; Loading events, then Loaded or Failed follow."""
        ...

    def cancel_load(self) -> None: ...

    def submit(self, request: Request) -> None:
        """Generate one reply; Queued, Prefill, StepDone events, then Finished follow."""
        ...

    def cancel(self, request_id: str) -> None: ...

    def set_policy(self, schedule: str) -> None:
        """Use another schedule from the next round on."""
        ...

    def close(self) -> Any:
        """End for good: nothing keeps running."""
        ...

    def drain(self) -> list[Event]: ...


def _engine_thread() -> EngineService:
    # Imported here, so that the screen is painted before anything heavy is loaded.
    from dspark_mlx.worker import EngineThread

    return EngineThread()


class EngineClient:
    """One engine, what was asked of it, and the trace of its events.

    ``make`` starts the engine at the first load; an ``engine`` that runs already may be given
    instead. With ``trace`` every event is also written to that file. ``wanted`` is the model that
    was asked for last, empty where there is none. Requests that are submitted before the first
    load was asked for wait here until ``release``.
    """

    def __init__(
        self,
        engine: EngineService | None = None,
        *,
        make: Callable[[], EngineService] = _engine_thread,
        trace: Path | None = None,
    ) -> None:
        self.engine = engine
        self.wanted = ""
        self._make = make
        self._trace = TraceWriter(trace) if trace else None
        self._loaded_for: tuple[Any, ...] = ()
        self._early: list[Request] | None = []  # None after ``release``
        self._own_events: list[Event] = []

    @property
    def replay(self) -> ReplayEngine | None:
        """The recording that is played; None where a real engine runs."""
        return self.engine if isinstance(self.engine, ReplayEngine) else None

    # Models

    def check(self, model: str) -> None:
        """Raises DsparkError if there is no such model."""
        if self.replay is None:
            Registry.load().resolve(model)

    def load(self, model: str, settings: Settings) -> None:
        """Load ``model`` in place of the present one. Raises DsparkError if it is unknown."""
        self.wanted = ""
        self.check(model)  # the engine checks it too, but later
        self.wanted, self._loaded_for = model or "recording", _load_key(model, settings)
        try:
            if self.engine is None:
                self.engine = self._make()
            self.engine.load(
                model,
                method=settings.method,
                schedule=settings.schedule,
                options=settings.load_options(),
            )
        except Exception as error:
            self._own_events.append(Failed(*_explain(error)))

    def needs_load(self, settings: Settings) -> bool:
        """Whether ``settings`` need another model than the one that was asked for last."""
        key = _load_key(settings.model or DEFAULT_MODEL, settings)
        return self.replay is None and key != self._loaded_for

    def cancel_load(self) -> None:
        if self.engine is not None:
            self.engine.cancel_load()

    def set_policy(self, schedule: str) -> None:
        if self.engine is not None:
            self.engine.set_policy(schedule)

    # Requests

    def submit(self, request: Request) -> None:
        """Generate a reply; its events end in Finished, also where the engine refuses it."""
        if self._early is not None:
            self._early.append(request)
            return
        if self.engine is None:
            self._refuse(request.id, "no model is loaded", "choose one with F5")
            return
        try:
            self.engine.submit(request)
        except Exception as error:
            self._refuse(request.id, *_explain(error))

    def cancel(self, request_id: str) -> None:
        """End a request; its Finished follows."""
        if any(request.id == request_id for request in self._early or ()):
            self._early = [r for r in self._early or () if r.id != request_id]
            self._own_events.append(Finished(request_id, "cancelled", method=""))
        elif self.engine is not None:
            self.engine.cancel(request_id)

    def release(self) -> None:
        """Submit the requests that waited for the first load to be asked for."""
        early, self._early = self._early or [], None
        for request in early:
            self.submit(request)

    def _refuse(self, request_id: str, message: str, hint: str) -> None:
        self._own_events.append(
            Finished(request_id, "error", method="", message=message, hint=hint)
        )

    # Events

    def drain(self) -> list[Event]:
        """The events since the last call. An engine that broke gives a Failed."""
        events, self._own_events = self._own_events, []
        try:
            if self.engine is not None:
                events += self.engine.drain()
        except Exception as error:
            events.append(Failed(f"the engine is gone: {error}", "load the model again with F5"))
        if self._trace is not None and events:
            try:
                self._trace.write(events)
            except OSError as error:  # a full disk ends the trace, not the chat
                self._trace = None
                events.append(Notice(f"the trace ends here: {error.strerror}"))
        return events

    def close(self) -> None:
        """End the engine and the trace."""
        if self.engine is not None:
            self.engine.close()
        self.drain()
        self.engine = None
        if self._trace is not None:
            with contextlib.suppress(OSError):
                self._trace.close()
            self._trace = None


def _load_key(model: str, settings: Settings) -> tuple[Any, ...]:
    """What a load depends on beside method and schedule, which each request may change."""
    return model, settings.drafter, settings.kv_bits


def _explain(error: Exception) -> tuple[str, str]:
    """What went wrong, and what to do."""
    if isinstance(error, DsparkError):
        return error.message, error.hint
    if isinstance(error, ImportError):
        return f"the engine cannot start: {error}", "install the package again"
    return f"the engine cannot start: {type(error).__name__}: {error}", ""
