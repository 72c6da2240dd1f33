"""Statistics of a run: one pure fold over the engine's events.

``EngineStats.apply`` takes one event at a time. The chat draws its charts from it; the command
line, the benchmark and a server can read the same numbers:

    stats = EngineStats()
    for event in events:
        stats.apply(event)
    stats.totals.acceptance, stats.totals.tokens_per_round, stats.tps_now

No clock and no I/O: all times are those of the events, so a replayed trace gives the recorded
speeds. Everything that is kept has a bounded size, so a run may last for days. Times are in
seconds, speeds in tokens per second.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from .events import (
    CostTable,
    Event,
    Failed,
    Finished,
    Load,
    Loaded,
    Loading,
    Memory,
    Prefill,
    Queued,
    RowStep,
    StepDone,
)

RECENT_ROUNDS = 600  # rounds kept as samples
RECENT_SECONDS = 2.0  # a speed "now" is the mean over this long
RELIABILITY_BINS = 10
MIN_PLAIN_ROUNDS = 5  # plain rounds needed before their median counts as the plain speed
FINISHED_REQUESTS = 64  # finished requests that are kept

Phase = Literal["queued", "prefill", "decoding", "finished"]


@dataclass(slots=True)
class DraftCounts:
    """Totals over the rounds of one request or of many.

    ``rounds`` counts a round once for each request in it. ``drafted``, ``scheduled`` (verified)
    and ``accepted`` count draft tokens; ``tokens`` counts committed tokens. ``cuts[n]`` is the
    number of rounds that verified n draft tokens, ``reached[k]`` of those that verified position
    k, ``survived[k]`` of those that accepted it.
    """

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    scheduled: int = 0
    accepted: int = 0
    cuts: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    survived: list[int] = field(default_factory=list)

    def add(self, row: RowStep) -> None:
        self.rounds += 1
        self.tokens += len(row.tokens)
        self.drafted += len(row.drafted)
        self.scheduled += row.scheduled
        self.accepted += row.accepted
        _grow(self.cuts, row.scheduled + 1)
        _grow(self.reached, row.scheduled)
        _grow(self.survived, row.scheduled)
        self.cuts[row.scheduled] += 1
        for k in range(row.scheduled):
            self.reached[k] += 1
            self.survived[k] += k < row.accepted

    @property
    def acceptance(self) -> float | None:
        """``accepted / scheduled``: the share of the verified draft tokens that were accepted."""
        return self.accepted / self.scheduled if self.scheduled else None

    @property
    def tokens_per_round(self) -> float | None:
        """``tokens / rounds``: the paper's accepted length, the target's own token included."""
        return self.tokens / self.rounds if self.rounds else None

    def acceptance_by_position(self) -> list[float | None]:
        """``survived[k] / reached[k]`` for each position; None where no round verified it."""
        return [
            survived / reached if reached else None
            for survived, reached in zip(self.survived, self.reached, strict=True)
        ]


@dataclass(slots=True)
class RequestStats:
    """One request: its phase, its counts, its speed and its last draft.

    ``label`` is the caller's own name for the request. ``last_draft`` is the newest round that
    drafted something (or the newest round, while none did), ``last_draft_round`` its number.
    """

    id: str
    label: str = ""
    phase: Phase = "queued"
    ahead: int = 0
    prefill_done: int = 0
    prefill_total: int = 0
    reused: int = 0
    method: str = ""
    position: int = 0
    counts: DraftCounts = field(default_factory=DraftCounts)
    started: float | None = None
    last_time: float = 0.0
    last_draft: RowStep | None = None
    last_draft_round: int = 0
    finished: Finished | None = None
    _recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=256))

    @property
    def active(self) -> bool:
        return self.phase != "finished"

    @property
    def context(self) -> int:
        """Tokens in the KV cache."""
        return max(self.position, self.prefill_done)

    @property
    def tps_now(self) -> float | None:
        return _tokens_per_second(self._recent)

    @property
    def tps_mean(self) -> float | None:
        if self.started is None or self.last_time <= self.started:
            return None
        return self.counts.tokens / (self.last_time - self.started)

    def add(self, row: RowStep, time: float, seconds: float) -> None:
        """Take in a round that ended at ``time`` and lasted ``seconds``."""
        self.phase, self.method = "decoding", row.method
        if self.started is None:
            self.started = time - seconds
            self._recent.append((self.started, 0))
        self.last_time = time
        self.counts.add(row)
        self.position = row.position + len(row.tokens)
        self._recent.append((time, len(row.tokens)))
        if row.drafted or self.last_draft is None or not self.last_draft.drafted:
            self.last_draft, self.last_draft_round = row, self.counts.rounds


@dataclass(frozen=True, slots=True)
class RoundSample:
    """One round, reduced to numbers. Token counts are sums over its ``rows`` requests."""

    time: float
    rows: int
    tokens: int
    scheduled: int
    accepted: int
    round_seconds: float
    draft_seconds: float
    verify_seconds: float
    host_seconds: float
    predicted_seconds: float | None
    slowdown: float


@dataclass(slots=True)
class ReliabilityBin:
    """Verified draft tokens of similar confidence: how many, their sum of it, how many accepted."""

    count: int = 0
    confidence: float = 0.0
    accepted: int = 0


def _empty_bins() -> list[ReliabilityBin]:
    return [ReliabilityBin() for _ in range(RELIABILITY_BINS)]


@dataclass
class EngineStats:
    """All that the events say about an engine.

    ``totals`` counts since the model was loaded, ``samples`` holds the newest rounds, ``requests``
    the running requests and the newest finished ones. ``version`` grows with every event.
    ``last_draft`` is the newest round of any request that drafted something.
    """

    version: int = 0
    loaded: Loaded | None = None
    loading: Loading | None = None
    failure: Failed | None = None
    cost: CostTable | None = None
    load: Load = field(default_factory=Load)
    memory: Memory = field(default_factory=Memory)
    policy: str = ""
    requests: dict[str, RequestStats] = field(default_factory=dict)
    totals: DraftCounts = field(default_factory=DraftCounts)
    samples: deque[RoundSample] = field(default_factory=lambda: deque(maxlen=RECENT_ROUNDS))
    reliability: list[ReliabilityBin] = field(default_factory=_empty_bins)
    last_draft: RowStep | None = None
    _plain: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    _recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=512))

    def apply(self, event: Event) -> None:
        self.version += 1
        match event:
            case StepDone():
                self._step(event)
            case Queued():
                self.request(event.request_id).ahead = event.ahead
            case Prefill():
                request = self.request(event.request_id)
                request.phase, request.reused = "prefill", event.reused
                request.prefill_done, request.prefill_total = event.done, event.total
            case Finished():
                request = self.request(event.request_id)
                request.phase, request.finished = "finished", event
                request.method = event.method or request.method
                done = [id for id, request in self.requests.items() if not request.active]
                for request_id in done[:-FINISHED_REQUESTS]:
                    del self.requests[request_id]
            case Loading():
                self.loading = event
            case Loaded():
                self._new_model(event)
            case CostTable():
                self.cost = event
            case Failed():
                self.failure, self.loading = event, None

    def request(self, request_id: str) -> RequestStats:
        """The statistics of a request, made on first use."""
        return self.requests.setdefault(request_id, RequestStats(request_id))

    @property
    def active(self) -> list[RequestStats]:
        return [request for request in self.requests.values() if request.active]

    @property
    def newest(self) -> list[RequestStats]:
        """The active requests; the newest request where none is active."""
        return self.active or list(self.requests.values())[-1:]

    @property
    def queued(self) -> int:
        """Requests waiting for a place as of the last round, at most the active ones."""
        return min(self.load.queued, len(self.active))

    @property
    def tps_now(self) -> float | None:
        """The speed of all requests together over the last ``RECENT_SECONDS``."""
        return _tokens_per_second(self._recent)

    @property
    def tps_per_request(self) -> float | None:
        """The mean speed of the active requests, or of the newest: what one reader sees."""
        known = [r.tps_mean for r in self.newest if r.tps_mean is not None]
        return statistics.mean(known) if known else None

    @property
    def plain_tps(self) -> float | None:
        """The speed of plain decoding of one request.

        The median of the rounds without a draft, once there were ``MIN_PLAIN_ROUNDS``; before
        that the speed that was measured when the model was loaded.
        """
        if len(self._plain) >= MIN_PLAIN_ROUNDS:
            return statistics.median(self._plain)
        return self.loaded.plain_tps if self.loaded else None

    @property
    def speedup(self) -> float | None:
        """``tps_per_request / plain_tps``."""
        mean, plain = self.tps_per_request, self.plain_tps
        return mean / plain if mean and plain else None

    @property
    def recent_acceptance(self) -> float | None:
        """Accepted per verified draft token over ``samples``."""
        scheduled = sum(s.scheduled for s in self.samples)
        return sum(s.accepted for s in self.samples) / scheduled if scheduled else None

    @property
    def recent_tokens_per_round(self) -> float | None:
        """Tokens per round and request over ``samples``."""
        rows = sum(s.rows for s in self.samples)
        return sum(s.tokens for s in self.samples) / rows if rows else None

    @property
    def block(self) -> int:
        """The largest number of draft tokens in a round, as far as is known; at least 1."""
        drafted = [len(r.last_draft.drafted) for r in self.requests.values() if r.last_draft]
        loaded = self.loaded.block if self.loaded else 0
        return max(1, loaded, len(self.totals.cuts) - 1, *drafted)

    def time_shares(self, rounds: int = 60) -> tuple[float, float, float]:
        """Shares of draft, verification and host in the time of the last rounds; or all 0."""
        last = list(self.samples)[-rounds:]
        draft = sum(s.draft_seconds for s in last)
        verify = sum(s.verify_seconds for s in last)
        host = sum(s.host_seconds for s in last)
        total = draft + verify + host
        return (draft / total, verify / total, host / total) if total > 0 else (0.0, 0.0, 0.0)

    def calibration_error(self) -> float | None:
        """Expected calibration error of the confidences: the mean over bins, by their counts."""
        total = sum(b.count for b in self.reliability)
        if not total:
            return None
        return sum(abs(b.confidence - b.accepted) for b in self.reliability) / total

    def _new_model(self, event: Loaded) -> None:
        before = self.loaded
        self.loaded, self.loading, self.failure = event, None, None
        if before and (before.model, before.drafter) != (event.model, event.drafter):
            # Numbers of another model would mislead.
            self.cost, self.last_draft = None, None
            self.totals, self.reliability = DraftCounts(), _empty_bins()
            for numbers in (self.samples, self._plain, self._recent):
                numbers.clear()

    def _step(self, event: StepDone) -> None:
        self.failure = None  # a failed load: the model from before it is at work
        rows, seconds = event.rows, event.round_seconds
        tokens = sum(len(row.tokens) for row in rows)
        self.load, self.memory, self.policy = event.load, event.memory, event.policy
        if not self._recent or event.time - self._recent[-1][0] > seconds + RECENT_SECONDS:
            self._recent.clear()  # nobody asked for anything meanwhile
            self._recent.append((event.time - seconds, 0))
        self._recent.append((event.time, tokens))
        if len(rows) == 1 and not rows[0].drafted and tokens and seconds > 0:
            self._plain.append(tokens / seconds)
        self.samples.append(
            RoundSample(
                time=event.time,
                rows=len(rows),
                tokens=tokens,
                scheduled=sum(row.scheduled for row in rows),
                accepted=sum(row.accepted for row in rows),
                round_seconds=seconds,
                draft_seconds=event.draft_seconds,
                verify_seconds=event.verify_seconds,
                host_seconds=event.host_seconds,
                predicted_seconds=event.predicted_seconds,
                slowdown=event.load.slowdown_fast,
            )
        )
        for row in rows:
            self.request(row.request_id).add(row, event.time, seconds)
            self.totals.add(row)
            self._add_confidences(row)
            if row.drafted:
                self.last_draft = row

    def _add_confidences(self, row: RowStep) -> None:
        # Position k was tested only if all positions before it were accepted.
        for k in range(min(row.scheduled, row.accepted + 1, len(row.confidence))):
            confidence = row.confidence[k]
            if 0.0 <= confidence <= 1.0:
                at = min(RELIABILITY_BINS - 1, int(confidence * RELIABILITY_BINS))
                self.reliability[at].count += 1
                self.reliability[at].confidence += confidence
                self.reliability[at].accepted += k < row.accepted


def _grow(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))


def _tokens_per_second(recent: deque[tuple[float, int]]) -> float | None:
    """The speed over the last ``RECENT_SECONDS`` of ``(time, tokens)`` marks."""
    if len(recent) < 2:
        return None
    end = recent[-1][0]
    tokens, start = 0, end
    for time, count in reversed(recent):
        start = time
        if end - time >= RECENT_SECONDS:
            break
        tokens += count
    return tokens / (end - start) if end > start else None
