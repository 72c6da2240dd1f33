"""The paper's two schedulers: Algorithm 1 (``early-stop``) and §5.2 (``lagged``).

Both draft the whole block and choose by expected tokens per second. They differ in
what keeps them lossless: Algorithm 1 reads this draft's confidences, and stops at the
first loss; §5.2 searches globally, over what was known two rounds ago.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace

import numpy as np

from .acceptance import Acceptance
from .cost import CostModel
from .limits import any_needs_confidence, cumulative, limits, marginal_gains, padded, unpriced
from .policy import Floats, Outcome, Plan, RowView, Schedule
from .round_prices import Prices

LAG = 2  # rounds: §5.2 settles a round's capacity while the one before it still runs


def prefix_schedule(
    survival: Sequence[Sequence[float]], seconds: Callable[[int, int], float]
) -> tuple[int, ...]:
    """Lengths per row, exactly Algorithm 1 (§3.2.2).

    Candidates of all rows are admitted in descending survival while tokens per second
    rise. The break keeps it lossless: the candidate (r, k) is judged by survivals that
    x_{r,k} has no part in, as appendix A demands. It finds the optimum when throughput
    has one peak and may stop short before a cliff.

    ``survival[r]`` is a_{r,1}, a_{r,2}, …, not increasing. ``seconds(B, W)``
    prices a step (1 / SPS) of B tokens in all, the widest row of W; a ragged
    engine's price depends on B alone, a padded one's on W.
    """
    rows = len(survival)
    lengths = [0] * rows
    # The best candidate left of each row; equal survivals by row, whatever their tokens.
    heap = [(-row[0], r, 1) for r, row in enumerate(survival) if len(row) and row[0] > 0]
    heapify(heap)
    batch, expected, widest = rows, float(rows), 0
    best = expected / seconds(batch, 1)
    while heap:
        minus_a, r, j = heap[0]
        batch, expected, widest = batch + 1, expected - minus_a, max(widest, j)
        throughput = expected / seconds(batch, widest + 1)
        if throughput <= best:
            break
        best = throughput
        lengths[r] = j
        row = survival[r]
        if j < len(row) and row[j] > 0:
            heapreplace(heap, (-row[j], r, j + 1))
        else:
            heappop(heap)
    return tuple(lengths)


class EarlyStop:
    """``--schedule early-stop``: drafts the whole block, reads its confidences, Algorithm 1.

    After the break the rows shorter than the widest are filled up to it: in a
    padded step that is free, and whether (r, k) lies within a width that was
    settled without x_{r,k} is known without it too.
    """

    name = "early-stop"

    def __init__(self, cost: CostModel | None = None) -> None:
        self.prices, self.acceptance = Prices(cost), Acceptance()

    def plan(self, rows: Sequence[RowView]) -> Plan:
        measure = self.prices.unmeasured(rows) if rows else None
        widths = tuple(row.cap if measure is None else min(row.cap, measure) for row in rows)
        needs = measure is None or any_needs_confidence(rows)
        return Plan(widths, any(widths) and needs)

    def schedule(
        self,
        rows: Sequence[RowView],
        drafted: Sequence[int],
        confidence: Sequence[Sequence[float]] | None,
    ) -> Schedule:
        allowed = limits(rows, drafted, confidence)
        most = max((length for length, _ in allowed), default=0)
        if confidence is None or not most or not self.prices.cost.known:
            return unpriced(allowed)
        calibrated = self.acceptance.calibrator.correct(rows, drafted, confidence)
        seconds = self.prices.drafting(rows, drafted, most, sync=True)
        survival = np.multiply.accumulate(calibrated, axis=1).tolist()
        candidates = [row[:n] for row, (n, _) in zip(survival, allowed, strict=True)]
        price = seconds.tolist()
        chosen = prefix_schedule(candidates, lambda batch, widest: float(price[widest - 1]))
        gains = cumulative(marginal_gains(calibrated, allowed))
        return padded(gains, seconds, max(chosen), allowed)

    def observe(self, outcome: Outcome) -> None:
        self.prices.observe(outcome)
        self.acceptance.observe(outcome)


def first_fall(rates: Floats) -> int:
    """The width at which tokens/s ``rates (K + 1,)`` first fall behind it; K where they never do.

    Algorithm 1's stop for rows that are admitted level by level, all rows at once: level k is
    judged by survivals a_{r,k}, which know nothing of any x_{r,k}.
    """
    falls = np.flatnonzero(rates[1:] <= rates[:-1])
    return int(falls[0]) if len(falls) else len(rates) - 1


class Lagged:
    """``--schedule lagged``: the best width by what was predicted ``LAG`` rounds ago (§5.2).

    A global search over the measured staircase, so no cliff traps it, but over
    survivals that were known two rounds ago: the width of this round is settled
    before its draft exists, which makes it lossless, and lets draft and verification
    be one graph without a sync in between. The paper caps the tokens of a batch and
    admits by current survival; rows here are padded, the cap is a width, and every
    token within it is admitted because it costs nothing more. A row without
    predictions that old counts with the mean of its rounds.
    """

    name = "lagged"

    def __init__(self, cost: CostModel | None = None) -> None:
        self.prices, self.acceptance = Prices(cost), Acceptance()
        self._past: deque[dict[str, Floats]] = deque(maxlen=LAG)
        self._width: int | None = None

    def plan(self, rows: Sequence[RowView]) -> Plan:
        caps = tuple(row.cap for row in rows)
        measure = self.prices.unmeasured(rows) if rows else None
        needs = any_needs_confidence(rows)
        self._width = None
        if measure is not None:
            caps = tuple(min(cap, measure) for cap in caps)
        elif any(caps) and self.prices.cost.known:
            seconds = self.prices.drafting(rows, caps, max(caps), sync=needs)
            gains = self._gains(rows, max(caps))
            self._width = int(np.argmax((len(rows) + gains) / seconds))
        return Plan(caps, needs)

    def schedule(
        self,
        rows: Sequence[RowView],
        drafted: Sequence[int],
        confidence: Sequence[Sequence[float]] | None,
    ) -> Schedule:
        allowed = limits(rows, drafted, confidence)
        if self._width is None:
            return unpriced(allowed)
        most = max((length for length, _ in allowed), default=0)
        seconds = self.prices.drafting(rows, drafted, most, sync=confidence is not None)
        return padded(self._gains(rows, most), seconds, min(self._width, most), allowed)

    def observe(self, outcome: Outcome) -> None:
        self.prices.observe(outcome)
        gains = self.acceptance.observe(outcome)
        self._past.append(
            {
                row.request_id: gains[r, : outcome.drafted[r] + 1]
                for r, row in enumerate(outcome.rows)
                if outcome.drafted[r] and row.known_confidence is None
            }
        )

    def _gains(self, rows: Sequence[RowView], most: int) -> Floats:
        """Tokens won by each width 0..``most``, by what was known ``LAG`` rounds ago."""
        old = self._past[0] if len(self._past) == LAG else {}
        gains = []
        for row in rows:
            gain = old.get(row.request_id)
            if gain is None or row.known_confidence is not None:  # a copy's is as old as its text
                gain = self.acceptance.gains(row)
            if row.cap:
                gains.append(gain[: row.cap + 1])
        return total_gain(gains, most)


def total_gain(gains: Sequence[Floats], most: int) -> Floats:
    """Σ_rows of ``gains``, each as long as its row allows, for widths 0..``most``.

    Past its end a row wins no more.
    """
    if all(len(gain) == most + 1 for gain in gains):
        return np.asarray(np.add.reduce(gains)) if gains else np.zeros(most + 1)
    total = np.zeros(most + 1)
    for gain in gains:
        n = min(len(gain), most + 1)
        total[:n] += gain[:n]
        total[n:] += gain[n - 1]
    return total
