"""A recorded trace, played back like an engine: for demonstrations, pictures and tests.

There is no model and no thread: ``drain`` returns the events that are due by the clock. Requests
of the recording itself get ids that start with ``RECORDED``, so that they differ from those that
were typed here.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from dspark_mlx.errors import UsageError
from dspark_mlx.events import (
    CostTable,
    Event,
    Finished,
    Loaded,
    Loading,
    Notice,
    Prefill,
    Queued,
    StepDone,
)
from dspark_mlx.request import Request
from dspark_mlx.trace import read_trace

from .conversation import Conversation

RECORDED = "recorded-"
_LONGEST_PAUSE = 5.0  # seconds; longer ones in the recording are cut to this
_SETUP = Loading | Loaded | CostTable
_Timed = tuple[float, Event]


def recording(path: Path) -> list[Event]:
    """The events of a recorded trace. Raises UsageError for a file that is not one."""
    if not path.exists():
        raise UsageError(f"there is no trace {path}", "record one: dspark-chat --trace FILE")
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a trace", "give the file that --trace wrote")
    events = list(read_trace(path))
    if not any(isinstance(event, StepDone) for event in events):
        raise UsageError(
            f"the trace {path} has no rounds in it", "record one: dspark-chat --trace FILE"
        )
    return [*events, *_cut_off(events)]


def _cut_off(events: Iterable[Event]) -> list[Event]:
    """A Finished for each reply that a recording, cut short, leaves open."""
    open_: dict[str, None] = {}
    for event in events:
        if isinstance(event, Finished):
            open_.pop(event.request_id, None)
        else:
            open_.update(dict.fromkeys(_ids(event)))
    return [Finished(name, "error", method="", message="the recording ends here") for name in open_]


class ReplayEngine:
    """Plays a trace at ``speed`` times its own pace; infinity plays all of it at once.

    ``load`` plays the whole recording under its own request ids, unless ``play`` is False;
    ``submit`` answers with one recorded reply, each in turn.
    """

    def __init__(
        self,
        events: Iterable[Event],
        speed: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        play: bool = True,
    ) -> None:
        timed = _timed(list(events))
        self.speed = speed
        self.paused = False
        self._clock, self._play = clock, play
        self._setup = [event for _, event in timed if isinstance(event, _SETUP)]
        self._rounds: list[_Timed] = [
            (when, event) for when, event in timed if not isinstance(event, _SETUP)
        ]
        self._replies = _replies(self._rounds)
        self._next_reply = 0
        self._tracks: list[_Track] = []
        self._now = clock()
        self._ready: deque[Event] = deque()
        self._times_played = 0

    def load(
        self, model: str, *, method: str, schedule: str, options: Mapping[str, object]
    ) -> None:
        self._ready.extend(self._setup)
        if self._play:
            self.restart()

    def cancel_load(self) -> None:
        """A recording loads nothing."""

    def restart(self) -> None:
        """Play the recording from its beginning, under fresh ids."""
        self._times_played += 1
        prefix = f"{RECORDED}{self._times_played}-"
        body = [(when, _renamed(event, lambda id: prefix + id)) for when, event in self._rounds]
        self._tracks.append(_Track(body, f"{prefix}*"))

    def control(self, what: str) -> str:
        """Carry out pause, faster, slower or restart; returns how it plays now."""
        if what == "pause":
            self.paused = not self.paused
        elif what == "restart":
            self.restart()
        else:
            self.speed *= 2.0 if what == "faster" else 0.5
        return "paused" if self.paused else f"{self.speed:g}× speed"

    def length_of_reply(self, number: int) -> float:
        """Seconds that a recorded reply takes at its own pace."""
        reply = self._replies[number % len(self._replies)]
        return reply[-1][0] - reply[0][0]

    def submit(self, request: Request) -> None:
        reply = self._replies[self._next_reply % len(self._replies)]
        self._next_reply += 1
        body = [(when, _renamed(event, lambda _: request.id)) for when, event in reply]
        self._tracks.append(_Track(body, request.id))

    def cancel(self, request_id: str) -> None:
        for track in self._tracks:
            if track.name == request_id:
                track.events.clear()
            elif request_id.startswith(track.name.removesuffix("*")):
                track.events = deque((t, e) for t, e in track.events if request_id not in _ids(e))
            else:
                continue
            self._ready.append(Finished(request_id, "cancelled", method=""))

    def set_policy(self, schedule: str) -> None:
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
    """Events that are being played; ``at`` is the time of the recording that was reached."""

    def __init__(self, events: Iterable[_Timed], name: str) -> None:
        self.name = name
        self.events = deque(events)
        self.at = self.events[0][0] if self.events else 0.0

    def due(self, passed: float) -> list[Event]:
        self.at += passed
        events = []
        while self.events and self.events[0][0] <= self.at:
            events.append(self.events.popleft()[1])
        return events


def _timed(events: list[Event]) -> list[_Timed]:
    """Events with a time each: rounds have their own, the others that of the round before."""
    timed: list[_Timed] = []
    last = next((e.time - e.round_seconds for e in events if isinstance(e, StepDone)), 0.0)
    shift = 0.0
    for event in events:
        if isinstance(event, StepDone):
            pause = event.time - event.round_seconds + shift - last
            shift -= max(0.0, pause - _LONGEST_PAUSE)
            last = event.time + shift
        timed.append((last, event))
    return timed


def _ids(event: Event) -> set[str]:
    if isinstance(event, StepDone):
        return {row.request_id for row in event.rows}
    name = getattr(event, "request_id", None)
    return {name} if name else set()


def _replies(timed: list[_Timed]) -> list[list[_Timed]]:
    """For each recorded request that made tokens: its events, without the rows of others."""
    replies: dict[str, list[_Timed]] = {}
    with_text: set[str] = set()
    for when, event in timed:
        if isinstance(event, StepDone):
            with_text |= _ids(event)
            for row in event.rows:
                alone = dataclasses.replace(event, rows=(row,))
                replies.setdefault(row.request_id, []).append((when, alone))
        elif isinstance(event, Queued | Prefill | Finished):
            replies.setdefault(event.request_id, []).append((when, event))
    return [events for name, events in replies.items() if name in with_text]


def _renamed(event: Event, rename: Callable[[str], str]) -> Event:
    """``event`` with another request id."""
    if isinstance(event, StepDone):
        rows = tuple(
            dataclasses.replace(row, request_id=rename(row.request_id)) for row in event.rows
        )
        return dataclasses.replace(event, rows=rows)
    if isinstance(event, Queued | Prefill | Finished):
        return dataclasses.replace(event, request_id=rename(event.request_id))
    return event


def recorded_conversations(event: Event, known: Collection[str | None]) -> list[Conversation]:
    """New chats for the recording's own requests in ``event`` that are not ``known``."""
    names = _ids(event) if isinstance(event, Queued | StepDone) else set()
    found = []
    for name in sorted(names):
        if not name.startswith(RECORDED) or name in known:
            continue
        title = name.rpartition("-")[2]
        chat = Conversation(title=f"recording {title}")
        chat.ask(f"(recorded request {title})")
        chat.open_reply(name)
        found.append(chat)
    return found
