"""What the events add up to: the numbers behind every gauge and chart.

Pure: no Textual, no clock, no I/O. ``LiveState.apply`` takes one event at a
time; widgets read. Everything kept is bounded, so a chat may run for days.
Times are the engine's own, so a replayed trace shows the recorded speeds.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from dspark_mlx.events import (
    CostTable,
    Event,
    Failed,
    Finished,
    Load,
    Loaded,
    Loading,
    Memory,
    Notice,
    Prefill,
    Queued,
    RowStep,
    StepDone,
)
from dspark_mlx.request import Status

from .request_state import NOW_SECONDS, RequestState, count_positions, grow, rate

SAMPLES = 600  # rounds kept for the charts
BINS = 10  # of the reliability diagram
MIN_PLAIN_ROUNDS = 5  # before an own baseline is believed


@dataclass(frozen=True, slots=True)
class Sample:
    """One round, reduced to what the charts plot; lengths are means over its rows."""

    time: float
    tokens: int
    rows: int
    drafted: float
    scheduled: float
    accepted: float
    verified: int
    kept: int
    round_seconds: float
    draft_seconds: float
    verify_seconds: float
    host_seconds: float
    predicted_seconds: float | None
    predicted_tps: float | None
    tps: float
    slowdown: float
    queued: int
    kv: int


@dataclass(slots=True)
class Bin:
    """One bin of the reliability diagram: how sure the drafter was, and how often it was right."""

    count: int = 0
    confidence: float = 0.0
    kept: int = 0


@dataclass
class LiveState:
    """All that is known of the engine now. ``version`` grows with every event."""

    version: int = 0
    loaded: Loaded | None = None
    loading: Loading | None = None
    cost: CostTable | None = None
    requests: dict[str, RequestState] = field(default_factory=dict)
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    load: Load = field(default_factory=Load)
    memory: Memory = field(default_factory=Memory)
    policy: str = ""
    cuts: list[int] = field(default_factory=list)  # cuts[n]: rows that verified n tokens
    reached: list[int] = field(default_factory=list)
    survived: list[int] = field(default_factory=list)
    reliability: list[Bin] = field(default_factory=lambda: [Bin() for _ in range(BINS)])
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    notices: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    failure: Failed | None = None
    last_row: RowStep | None = None
    _recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=512))

    def apply(self, event: Event) -> None:
        self.version += 1
        match event:
            case StepDone():
                self._step(event)
            case Queued(request_id, ahead):
                request = self.request(request_id)
                request.ahead = ahead
            case Prefill(request_id, done, total, reused):
                request = self.request(request_id)
                request.status = Status.PREFILL
                request.prefill_done, request.prefill_total = done, total
                request.reused = reused
            case Finished():
                request = self.request(event.request_id)
                request.status, request.finished = Status.FINISHED, event
                request.method = event.method or request.method
                self._forget()
            case Loading():
                self.loading = event
            case Loaded():
                self._new_model(event)
            case CostTable():
                self.cost = event
            case Failed():
                self.failure, self.loading = event, None
            case Notice(message):
                self.notices.append(message)

    def request(self, request_id: str) -> RequestState:
        return self.requests.setdefault(request_id, RequestState(request_id))

    @property
    def active(self) -> list[RequestState]:
        return [request for request in self.requests.values() if request.active]

    @property
    def queued(self) -> int:
        """Requests that wait for a place, as of the last round; none where nothing runs."""
        return min(self.load.queued, len(self.active))

    @property
    def tps_now(self) -> float | None:
        """Tokens a second over all requests, lately."""
        return rate(self._recent, NOW_SECONDS)

    @property
    def baseline(self) -> float | None:
        """Plain decoding's tokens/s: seen in rounds without a draft, else as profiled at load."""
        if len(self.plain) >= MIN_PLAIN_ROUNDS:
            return statistics.median(self.plain)
        return self.loaded.plain_tps if self.loaded else None

    @property
    def tps_reply(self) -> float | None:
        """Mean speed of a running reply, else of the last one: what a reader of it sees."""
        rates = [r.tps_mean for r in (self.active or list(self.requests.values())[-1:])]
        known = [rate for rate in rates if rate is not None]
        return statistics.mean(known) if known else None

    @property
    def speedup(self) -> float | None:
        """``tps_reply`` against plain decoding of a reply that has the device to itself."""
        mean, baseline = self.tps_reply, self.baseline
        return mean / baseline if mean and baseline else None

    @property
    def acceptance(self) -> float | None:
        verified = sum(s.verified for s in self.samples)
        return sum(s.kept for s in self.samples) / verified if verified else None

    @property
    def per_round(self) -> float | None:
        rows = sum(s.rows for s in self.samples)
        return sum(s.tokens for s in self.samples) / rows if rows else None

    @property
    def block(self) -> int:
        """Most draft tokens a round can have, as far as is known."""
        drafted = max((len(r.last.drafted) for r in self.requests.values() if r.last), default=0)
        return max(self.loaded.block if self.loaded else 0, len(self.cuts) - 1, drafted, 1)

    def shares(self, rounds: int = 60) -> tuple[float, float, float]:
        """Draft, verify and host share of the last rounds' time, summing to 1 (or all 0)."""
        last = list(self.samples)[-rounds:]
        draft = sum(s.draft_seconds for s in last)
        verify = sum(s.verify_seconds for s in last)
        host = sum(s.host_seconds for s in last)
        total = draft + verify + host
        return (draft / total, verify / total, host / total) if total > 0 else (0.0, 0.0, 0.0)

    def by_position(self) -> list[float | None]:
        """How often draft position k survived when it was verified."""
        return [
            kept / tried if tried else None
            for kept, tried in zip(self.survived, self.reached, strict=True)
        ]

    def calibration_error(self) -> float | None:
        """Expected calibration error of the confidence, over the bins."""
        total = sum(b.count for b in self.reliability)
        if not total:
            return None
        return sum(abs(b.confidence - b.kept) for b in self.reliability) / total

    def _new_model(self, event: Loaded) -> None:
        changed = self.loaded is not None and (self.loaded.model, self.loaded.drafter) != (
            event.model,
            event.drafter,
        )
        self.loaded, self.loading, self.failure = event, None, None
        if changed:  # another model's numbers would mislead
            self.cost = None
            self.samples.clear()
            self.plain.clear()
            self._recent.clear()
            self.cuts, self.reached, self.survived = [], [], []
            self.reliability = [Bin() for _ in range(BINS)]
            self.last_row = None

    def _step(self, event: StepDone) -> None:
        self.failure = None  # of a load: the model from before it is at work
        rows = event.rows
        tokens = sum(len(row.tokens) for row in rows)
        self.load, self.memory, self.policy = event.load, event.memory, event.policy
        if not self._recent or event.time - self._recent[-1][0] > event.round_seconds + NOW_SECONDS:
            self._recent.clear()  # a pause is not slowness
            self._recent.append((event.time - event.round_seconds, 0))
        self._recent.append((event.time, tokens))
        if len(rows) == 1 and not rows[0].drafted and tokens and event.round_seconds > 0:
            self.plain.append(tokens / event.round_seconds)
        count = max(1, len(rows))
        self.samples.append(
            Sample(
                time=event.time,
                tokens=tokens,
                rows=len(rows),
                drafted=sum(len(row.drafted) for row in rows) / count,
                scheduled=sum(row.scheduled for row in rows) / count,
                accepted=sum(row.accepted for row in rows) / count,
                verified=sum(row.scheduled for row in rows),
                kept=sum(row.accepted for row in rows),
                round_seconds=event.round_seconds,
                draft_seconds=event.draft_seconds,
                verify_seconds=event.verify_seconds,
                host_seconds=event.host_seconds,
                predicted_seconds=event.predicted_seconds,
                predicted_tps=event.predicted_tps,
                tps=event.tps,
                slowdown=event.load.slowdown_fast,
                queued=event.load.queued,
                kv=event.memory.kv,
            )
        )
        for row in rows:
            self.request(row.request_id).step(row, event.time, event.round_seconds)
            grow(self.cuts, row.scheduled + 1)
            self.cuts[row.scheduled] += 1
            count_positions(self.reached, self.survived, row)
            self._rely(row)
            if row.drafted:
                self.last_row = row

    def _rely(self, row: RowStep) -> None:
        # Position k was put to the test only if all before it were kept.
        for k in range(min(row.scheduled, row.accepted + 1, len(row.confidence))):
            sure = row.confidence[k]
            if not 0.0 <= sure <= 1.0:
                continue
            slot = self.reliability[min(BINS - 1, int(sure * BINS))]
            slot.count += 1
            slot.confidence += sure
            slot.kept += k < row.accepted

    def _forget(self) -> None:
        done = [r.id for r in self.requests.values() if not r.active]
        for request_id in done[:-64]:
            del self.requests[request_id]
