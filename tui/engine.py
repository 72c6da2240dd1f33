"""The engine as the app sees it: one backend, what was asked of it, what it told.

Without Textual. Commands go to the backend, events into the live state. What
is typed before the first load has been asked for waits here until it is.
"""

from __future__ import annotations

from typing import Any

from dspark_mlx.errors import DsparkError
from dspark_mlx.events import Event, Failed, Finished
from dspark_mlx.registry import DEFAULT_MODEL, Registry
from dspark_mlx.request import Request

from .backend import LOAD, Backend, TracingBackend
from .replay import ReplayBackend
from .settings import Settings
from .state import LiveState


class Engine:
    """``wanted`` is the model asked for last, empty where there is none."""

    def __init__(self, backend: Backend, live: LiveState) -> None:
        self._backend, self._live = backend, live
        self.wanted = ""
        self._asked_to_load: tuple[Any, ...] = ()
        self._early: list[Request] | None = []  # None once the first load has been asked for
        self._own: list[Event] = []

    @property
    def replay(self) -> ReplayBackend | None:
        """The replay backend, also below a trace; None when a real engine runs."""
        backend = self._backend
        inner = backend.inner if isinstance(backend, TracingBackend) else backend
        return inner if isinstance(inner, ReplayBackend) else None

    def load(self, model: str, settings: Settings) -> None:
        """Have ``model`` loaded; raises DsparkError, also told to the live state, if unknown."""
        self.wanted = model or "recording"
        self._asked_to_load = _needed(model, settings)
        try:
            self.check(model)  # the engine does it too; this answers at once
        except DsparkError as error:
            self._live.apply(Failed(error.message, error.hint))
            self.wanted = ""
            raise
        self._live.failure = None
        self._backend.load(
            model, method=settings.method, schedule=settings.schedule, options=settings.options()
        )

    def check(self, model: str) -> None:
        """Raises DsparkError where there is no such model."""
        if self.replay is None:
            Registry.load().resolve(model)

    def must_load(self, settings: Settings) -> bool:
        """Whether ``settings`` need another model than the one asked for last."""
        needed = _needed(settings.model or DEFAULT_MODEL, settings)
        return self.replay is None and needed != self._asked_to_load

    def cancel_load(self) -> None:
        self._backend.cancel(LOAD)

    def submit(self, request: Request) -> None:
        """Pass a request on; one typed before the first load was asked for waits for that."""
        if self._early is not None:
            self._early.append(request)
        else:
            self._backend.submit(request)

    def cancel(self, request_id: str) -> None:
        """End a request, also one that still waits here; its Finished follows."""
        early = self._early or []
        if any(request.id == request_id for request in early):
            self._early = [request for request in early if request.id != request_id]
            self._own.append(Finished(request_id, "cancelled", method=""))
        else:
            self._backend.cancel(request_id)

    def release(self) -> None:
        """The first load has been asked for, or refused: pass on what waited for it."""
        early, self._early = self._early or [], None
        for request in early:
            self._backend.submit(request)

    def drain(self) -> list[Event]:
        """The events since the last call; a backend that broke is a Failed among them."""
        own, self._own = self._own, []
        try:
            return own + self._backend.drain()
        except Exception as error:
            return [*own, Failed(f"the engine is gone: {error}", "load the model again with F5")]


def _needed(model: str, settings: Settings) -> tuple[Any, ...]:
    return model, settings.drafter, settings.kv_bits
