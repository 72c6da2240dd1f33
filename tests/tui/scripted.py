"""An engine for tests that answers from a script, one round for each drain."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Any

from dspark_mlx.events import (
    Event,
    Finished,
    Load,
    Loaded,
    Memory,
    Prefill,
    Queued,
    RowStep,
    StepDone,
    Token,
)
from dspark_mlx.request import Request

LOADED = Loaded(
    "toy", "toy-drafter", "dspark", "a drafter is registered", "auto", 4, 4096, 10, 20.0
)


def finished(request_id: str, reason: str = "stop", tokens: int = 5, **more: Any) -> Finished:
    values: dict[str, Any] = dict(
        request_id=request_id,
        reason=reason,
        prompt_tokens=10,
        reused_tokens=0,
        generation_tokens=tokens,
        prompt_seconds=0.1,
        first_token_seconds=0.2,
        generation_seconds=1.0,
        rounds=max(1, tokens // 2),
        drafted=2 * tokens,
        scheduled=tokens,
        accepted=tokens // 2,
        reached=(2, 1),
        survived=(1, 1),
        method="dspark",
        seed=1,
    )
    return Finished(**(values | more))


def step(
    request_id: str,
    texts: list[str],
    number: int = 1,
    drafted: int = 3,
    time: float | None = None,
    reason: str = "verifying 1 more would cost 3.0 ms for 0.10 expected tokens",
) -> StepDone:
    """One round: all of ``texts`` but the last were accepted draft tokens."""
    kept = len(texts) - 1
    tokens = tuple(
        Token(i, text, "draft" if i < kept else "target", 0.9 if i < kept else None)
        for i, text in enumerate(texts)
    )
    scheduled = min(max(kept, drafted - 1), max(drafted, kept))
    width = max(drafted, kept)
    row = RowStep(
        request_id,
        10 + 2 * number,
        "dspark",
        tuple(range(width)),
        tuple((texts[:kept] + [" no"] * width)[:width]),
        tuple(0.9 - 0.1 * k for k in range(width)),
        tuple(0.8 - 0.2 * k for k in range(width)),
        scheduled,
        kept,
        tokens,
        reason,
        tuple(10.0 + k for k in range(width + 1)),
        True,
    )
    when = number * 0.05 if time is None else time
    return StepDone(
        number, when, (row,), "auto", 0.05, 0.01, 0.035, 0.005, 0.048, 40.0,
        len(texts) / 0.05, 1, Load(1, 0, 1.1, 1.0), Memory(1000, 200, 1500),
    )  # fmt: skip


class ScriptedEngine:
    """Replies with the texts of ``replies`` in turn; ``hold`` keeps them from going on.

    ``hold_after`` sets ``hold`` once so many more rounds were handed out.

    ``calls`` lists every command received.
    """

    def __init__(self, replies: list[str] | None = None, auto_load: bool = True) -> None:
        self.replies = deque(replies or [])
        self.hold = False
        self.hold_after: int | None = None
        self.words = 6  # a round
        self.auto_load = auto_load
        self.calls: list[tuple[Any, ...]] = []
        self.requests: list[Request] = []
        self.closed = False
        self.broken: Exception | None = None
        self._events: deque[Event] = deque()
        self._running: dict[str, deque[str]] = {}
        self._count = 0

    def load(self, model: str, *, method: str, schedule: str, options: Mapping[str, Any]) -> None:
        self.calls.append(("load", model, method, schedule, dict(options)))
        if self.auto_load:
            self._events.append(LOADED)

    def submit(self, request: Request) -> None:
        self.calls.append(("submit", request.id))
        self.requests.append(request)
        text = self.replies.popleft() if self.replies else "An answer."
        self._running[request.id] = deque(re.findall(r"\s*\S+|\s+$", text))
        self._events.append(Queued(request.id, 0))
        self._events.append(Prefill(request.id, 10, 10, 0))

    def cancel(self, request_id: str) -> None:
        self.calls.append(("cancel", request_id))
        if self._running.pop(request_id, None) is not None:
            self._events.append(finished(request_id, "cancelled", 2))

    def cancel_load(self) -> None:
        self.calls.append(("cancel_load",))

    def set_policy(self, schedule: str) -> None:
        self.calls.append(("set_policy", schedule))

    def close(self) -> None:
        self.closed = True

    def emit(self, *events: Event) -> None:
        self._events.extend(events)

    def drain(self) -> list[Event]:
        if self.broken:
            raise self.broken
        events = list(self._events)
        self._events.clear()
        if self.hold:
            return events
        for request_id, words in list(self._running.items()):
            self._count += 1
            texts = [words.popleft() for _ in range(min(self.words, len(words)))]
            if texts:
                events.append(step(request_id, texts, self._count))
                if self.hold_after is not None:
                    self.hold_after -= 1
                    self.hold, self.hold_after = self.hold_after < 1, self.hold_after or None
            if not words:
                del self._running[request_id]
                events.append(finished(request_id))
        return events
