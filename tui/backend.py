"""Where events come from: the protocol, the engine's own thread, and a trace kept on the way.

The app knows only the ``Backend`` protocol: commands that return at once, and
``drain`` for the events since the last call. Nothing here blocks the app, and
nothing imports mlx before a model is really loaded. ``replay`` has the backend
that needs no model.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from dspark_mlx.errors import DsparkError
from dspark_mlx.events import Event, Failed, Finished, Notice
from dspark_mlx.request import Request
from dspark_mlx.trace import TraceWriter

LOAD = "load"  # ``cancel(LOAD)`` ends a download or load under way


class Backend(Protocol):
    """Commands in, events out. Commands never raise for what the engine will report."""

    def load(self, model: str, *, method: str, schedule: str, options: Mapping[str, Any]) -> None:
        """Get ``model`` ready; Loading..., then Loaded or Failed follow."""
        ...

    def submit(self, request: Request) -> None:
        """Generate one reply; Queued, Prefill..., StepDone..., Finished follow."""
        ...

    def cancel(self, request_id: str) -> None: ...

    def set_schedule(self, schedule: str) -> None:
        """Use another schedule from the next round on, without loading again."""
        ...

    def close(self) -> None:
        """End for good: nothing keeps running."""
        ...

    def drain(self) -> list[Event]: ...


class EngineBackend:
    """The engine's own thread, started (and mlx imported) at the first ``load``.

    ``make`` builds the engine thread; tests pass one with toy models.
    """

    def __init__(self, make: Callable[[], Any] | None = None) -> None:
        self._make = make or _engine_thread
        self._engine: Any = None
        self._own: deque[Event] = deque()

    def load(self, model: str, *, method: str, schedule: str, options: Mapping[str, Any]) -> None:
        try:
            if self._engine is None:
                self._engine = self._make()
            self._engine.load(model, method=method, schedule=schedule, options=options)
        except Exception as error:
            self._own.append(_failed(error))

    def submit(self, request: Request) -> None:
        if self._engine is None:
            self._own.append(_refused(request.id, "no model is loaded", "choose one with F5"))
            return
        try:
            self._engine.submit(request)
        except Exception as error:
            failure = _failed(error)
            self._own.append(_refused(request.id, failure.message, failure.hint))

    def cancel(self, request_id: str) -> None:
        if self._engine is None:
            return
        if request_id == LOAD:
            self._engine.cancel_load()
        else:
            self._engine.cancel(request_id)

    def set_schedule(self, schedule: str) -> None:
        if self._engine is not None:
            self._engine.set_policy(schedule)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def drain(self) -> list[Event]:
        events = list(self._own)
        self._own.clear()
        if self._engine is not None:
            events.extend(self._engine.drain())
        return events


def _engine_thread() -> Any:
    # Deferred on purpose: the screen is painted before anything heavy is imported.
    from dspark_mlx.worker import EngineThread

    return EngineThread()


def _failed(error: Exception) -> Failed:
    if isinstance(error, DsparkError):
        return Failed(error.message, error.hint)
    if isinstance(error, ImportError):
        return Failed(f"the engine cannot start: {error}", "reinstall dspark-chat")
    return Failed(f"the engine cannot start: {type(error).__name__}: {error}")


def _refused(request_id: str, message: str, hint: str = "") -> Finished:
    """A request that failed before the engine saw it."""
    return Finished(request_id, "error", method="", message=message, hint=hint)


class TracingBackend:
    """Any backend, with every event also written to a trace file."""

    def __init__(self, inner: Backend, path: Path) -> None:
        self.inner = inner
        self._trace: TraceWriter | None = TraceWriter(path)

    def load(self, model: str, *, method: str, schedule: str, options: Mapping[str, Any]) -> None:
        self.inner.load(model, method=method, schedule=schedule, options=options)

    def submit(self, request: Request) -> None:
        self.inner.submit(request)

    def cancel(self, request_id: str) -> None:
        self.inner.cancel(request_id)

    def set_schedule(self, schedule: str) -> None:
        self.inner.set_schedule(schedule)

    def drain(self) -> list[Event]:
        events = self.inner.drain()
        if self._trace is not None and events:
            try:
                self._trace.write(events)
            except OSError as error:  # a full disk ends the trace, not the chat
                self._trace = None
                events.append(Notice(f"the trace ends here: {error.strerror}"))
        return events

    def close(self) -> None:
        self.inner.close()
        self.drain()
        if self._trace is not None:
            with contextlib.suppress(OSError):
                self._trace.close()
            self._trace = None
