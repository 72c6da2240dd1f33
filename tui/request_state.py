"""One request as the events tell it: how far it is, how fast, and its last round.

Pure, like ``state``, which keeps one of these for each request. The helpers
count and time rounds for a single request and for all of them alike.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dspark_mlx.events import Finished, RowStep
from dspark_mlx.request import Status

NOW_SECONDS = 2.0  # "now" is the mean over this long


@dataclass(slots=True)
class RequestState:
    """One request as seen so far. Lengths count draft tokens; ``tokens`` counts committed ones."""

    id: str
    title: str = ""  # of the conversation it belongs to, where that is known
    status: Status = Status.QUEUED
    ahead: int = 0
    prefill_done: int = 0
    prefill_total: int = 0
    reused: int = 0
    method: str = ""
    position: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    scheduled: int = 0
    accepted: int = 0
    reached: list[int] = field(default_factory=list)
    survived: list[int] = field(default_factory=list)
    started: float | None = None
    last_time: float = 0.0
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=256))
    last: RowStep | None = None  # the last round with a draft, and its number
    last_round: int = 0
    finished: Finished | None = None

    @property
    def active(self) -> bool:
        return self.status is not Status.FINISHED

    @property
    def acceptance(self) -> float | None:
        """Share of the verified draft tokens that the target kept."""
        return self.accepted / self.scheduled if self.scheduled else None

    @property
    def per_round(self) -> float | None:
        """Tokens a round, the target's own included (the paper's accepted length)."""
        return self.tokens / self.rounds if self.rounds else None

    @property
    def context(self) -> int:
        return max(self.position, self.prefill_done)

    @property
    def tps_now(self) -> float | None:
        return rate(self.recent, NOW_SECONDS)

    @property
    def tps_mean(self) -> float | None:
        if self.started is None or self.last_time <= self.started:
            return None
        return self.tokens / (self.last_time - self.started)

    def step(self, row: RowStep, time: float, seconds: float) -> None:
        self.status = Status.DECODING
        self.method = row.method
        if self.started is None:
            self.started = time - seconds
            self.recent.append((self.started, 0))
        self.last_time = time
        self.rounds += 1
        self.tokens += len(row.tokens)
        self.drafted += len(row.drafted)
        self.scheduled += row.scheduled
        self.accepted += row.accepted
        self.position = row.position + len(row.tokens)
        self.recent.append((time, len(row.tokens)))
        count_positions(self.reached, self.survived, row)
        if row.drafted or self.last is None or not self.last.drafted:
            self.last, self.last_round = row, self.rounds


def grow(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))


def count_positions(reached: list[int], survived: list[int], row: RowStep) -> None:
    grow(reached, row.scheduled)
    grow(survived, row.scheduled)
    for k in range(row.scheduled):
        reached[k] += 1
        survived[k] += k < row.accepted


def rate(recent: deque[tuple[float, int]], span: float) -> float | None:
    """Tokens a second over the last ``span`` seconds of ``(time, tokens)`` marks."""
    if len(recent) < 2:
        return None
    end = recent[-1][0]
    tokens, start = 0, end
    for time, count in reversed(recent):
        start = time
        if end - time >= span:
            break
        tokens += count
    return tokens / (end - start) if end > start else None
