"""Where events come from: the engine's thread, or a recorded trace.

The app knows only the ``Backend`` protocol: commands that return at once, and
``drain`` for the events since the last call. Nothing here blocks the app, and
nothing imports mlx before a model is really loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from dspark_mlx.errors import DsparkError, UsageError
from dspark_mlx.events import (
    CostTable,
    Event,
    Failed,
    Finished,
    Loaded,
    Loading,
    Notice,
    Prefill,
    Queued,
    StepDone,
)
from dspark_mlx.request import Request
from dspark_mlx.trace import TraceWriter, read_trace

LOAD = "load"  # ``cancel(LOAD)`` ends a download or load under way
_ADOPTED = "recorded-"


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
            self._own.append(ended(request.id, "no model is loaded", "choose one with F5"))
            return
        try:
            self._engine.submit(request)
        except Exception as error:
            failure = _failed(error)
            self._own.append(ended(request.id, failure.message, failure.hint))

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
        return Failed(f"the engine cannot start: {error}", "reinstall dspark-mlx")
    return Failed(f"the engine cannot start: {type(error).__name__}: {error}")


def ended(request_id: str, message: str, hint: str = "") -> Finished:
    """A request that failed before the engine saw it."""
    return Finished(
        request_id=request_id,
        reason="error",
        prompt_tokens=0,
        reused_tokens=0,
        generation_tokens=0,
        prompt_seconds=0.0,
        first_token_seconds=0.0,
        generation_seconds=0.0,
        rounds=0,
        drafted=0,
        scheduled=0,
        accepted=0,
        reached=(),
        survived=(),
        method="",
        message=message,
        hint=hint,
    )


class TracingBackend:
    """Any backend, with every event also written to a trace file."""

    def __init__(self, inner: Backend, path: Path) -> None:
        self._inner = inner
        self._trace: TraceWriter | None = TraceWriter(path)

    def load(self, model: str, *, method: str, schedule: str, options: Mapping[str, Any]) -> None:
        self._inner.load(model, method=method, schedule=schedule, options=options)

    def submit(self, request: Request) -> None:
        self._inner.submit(request)

    def cancel(self, request_id: str) -> None:
        self._inner.cancel(request_id)

    def set_schedule(self, schedule: str) -> None:
        self._inner.set_schedule(schedule)

    def drain(self) -> list[Event]:
        events = self._inner.drain()
        if self._trace is not None and events:
            try:
                self._trace.write(events)
            except OSError as error:  # a full disk ends the trace, not the chat
                self._trace = None
                events.append(Notice(f"the trace ends here: {error.strerror}"))
        return events

    def close(self) -> None:
        self._inner.close()
        self.drain()
        if self._trace is not None:
            with contextlib.suppress(OSError):
                self._trace.close()
            self._trace = None


def recording(path: Path) -> list[Event]:
    """The events of a recorded trace; raises UsageError for a file that is not one."""
    events = list(read_trace(path))
    if not any(isinstance(event, StepDone) for event in events):
        raise UsageError(
            f"the trace {path} has no rounds in it", "record one: dspark-chat --trace FILE"
        )
    return events


class ReplayBackend:
    """Plays a trace at ``speed`` times its own pace (infinite: all at once).

    ``load`` plays the whole recording under its own request ids; ``submit``
    answers with one recorded reply, taken in turn. No model, no threads:
    ``drain`` hands out what is due by the clock.
    """

    def __init__(
        self,
        events: Iterable[Event],
        speed: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        play: bool = True,
    ) -> None:
        self._clock = clock
        self._play = play
        self.speed = speed
        self.paused = False
        self._timed = _timed(list(events))
        self._replies = _replies(self._timed)
        self._next_reply = 0
        self._tracks: list[_Track] = []
        self._now = clock()
        self._ready: deque[Event] = deque()
        self._step = 0

    def load(self, model: str, *, method: str, schedule: str, options: Mapping[str, Any]) -> None:
        self._ready.extend(e for _, e in self._timed if isinstance(e, Loading | Loaded | CostTable))
        if self._play:
            self.restart()

    def restart(self) -> None:
        """Play the recording from its beginning, under fresh ids."""
        self._step += 1
        prefix = f"{_ADOPTED}{self._step}-"
        body = [
            (when, _renamed(event, prefix))
            for when, event in self._timed
            if not isinstance(event, Loading | Loaded | CostTable)
        ]
        self._tracks.append(_Track(body, f"{prefix}*"))

    def length_of_reply(self, number: int) -> float:
        """Seconds that a recorded reply takes at its own pace."""
        reply = self._replies[number % len(self._replies)]
        return reply[-1][0] - reply[0][0]

    def submit(self, request: Request) -> None:
        reply = self._replies[self._next_reply % len(self._replies)]
        self._next_reply += 1
        self._tracks.append(_Track([(t, _as(e, request.id)) for t, e in reply], request.id))

    def cancel(self, request_id: str) -> None:
        for track in self._tracks:
            if track.name == request_id:
                track.events.clear()
            elif request_id.startswith(track.name.removesuffix("*")):
                track.events = deque((t, e) for t, e in track.events if request_id not in _ids(e))
            else:
                continue
            self._ready.append(dataclasses.replace(ended(request_id, ""), reason="cancelled"))

    def set_schedule(self, schedule: str) -> None:
        self._ready.append(Notice("a recording keeps the schedule it was made with"))

    def close(self) -> None:
        self._tracks.clear()
        self._ready.clear()

    def drain(self) -> list[Event]:
        now = self._clock()
        passed, self._now = (now - self._now), now
        events = list(self._ready)
        self._ready.clear()
        if not self.paused:
            for track in self._tracks:
                # Infinitely fast, but not before time passes at all.
                events.extend(track.due(passed * self.speed if passed else 0.0))
            self._tracks = [track for track in self._tracks if track.events]
        return events


class _Track:
    """Events being played; ``at`` is the recording's time reached."""

    def __init__(self, events: Iterable[tuple[float, Event]], name: str) -> None:
        self.name = name
        self.events = deque(events)
        self.at = self.events[0][0] if self.events else 0.0

    def due(self, passed: float) -> list[Event]:
        self.at += passed
        events = []
        while self.events and self.events[0][0] <= self.at:
            events.append(self.events.popleft()[1])
        return events


def _timed(events: list[Event]) -> list[tuple[float, Event]]:
    """Events with a time each: rounds have their own, others get the round's they precede."""
    timed: list[tuple[float, Event]] = []
    last = next((e.time - e.round_seconds for e in events if isinstance(e, StepDone)), 0.0)
    longest = 5.0  # a pause while nobody asked anything is cut to this
    shift = 0.0
    for event in events:
        if isinstance(event, StepDone):
            idle = event.time - event.round_seconds + shift - last
            if idle > longest:
                shift -= idle - longest
            last = event.time + shift
        timed.append((last, event))
    return timed


def _ids(event: Event) -> set[str]:
    if isinstance(event, StepDone):
        return {row.request_id for row in event.rows}
    name = getattr(event, "request_id", None)
    return {name} if name else set()


def _replies(timed: list[tuple[float, Event]]) -> list[list[tuple[float, Event]]]:
    """For each recorded request that made tokens: its events, other rows taken out."""
    replies: dict[str, list[tuple[float, Event]]] = {}
    spoke: set[str] = set()
    for when, event in timed:
        if isinstance(event, StepDone):
            for row in event.rows:
                alone = dataclasses.replace(event, rows=(row,))
                replies.setdefault(row.request_id, []).append((when, alone))
                spoke.add(row.request_id)
        elif isinstance(event, Queued | Prefill | Finished):
            replies.setdefault(event.request_id, []).append((when, event))
    return [events for name, events in replies.items() if name in spoke]


def _as(event: Event, request_id: str) -> Event:
    if isinstance(event, StepDone):
        rows = tuple(dataclasses.replace(row, request_id=request_id) for row in event.rows)
        return dataclasses.replace(event, rows=rows)
    if isinstance(event, Queued | Prefill | Finished):
        return dataclasses.replace(event, request_id=request_id)
    return event


def _renamed(event: Event, prefix: str) -> Event:
    if isinstance(event, StepDone):
        rows = tuple(
            dataclasses.replace(row, request_id=prefix + row.request_id) for row in event.rows
        )
        return dataclasses.replace(event, rows=rows)
    if isinstance(event, Queued | Prefill | Finished):
        return dataclasses.replace(event, request_id=prefix + event.request_id)
    return event
