"""Algorithm 1 of the paper (§3.2.2): greedy admission that stops at the first loss.

Candidates of all rows are admitted in descending survival while tokens per
second rise. The break keeps it lossless: the candidate (r, k) is judged by
survivals that x_{r,k} has no part in, as appendix A demands. It finds the
optimum when throughput has one peak and may stop short before a cliff.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace

from .cost import CostModel
from .cuts import limits
from .learner import Learner
from .padded import gains_of, padded, survivals
from .policy import Outcome, Plan, RowView, Schedule
from .reasons import unpriced


def prefix_schedule(
    survival: Sequence[Sequence[float]], seconds: Callable[[int, int], float]
) -> tuple[int, ...]:
    """Lengths per row, exactly Algorithm 1.

    ``survival[r]`` is a_{r,1}, a_{r,2}, ..., not increasing. ``seconds(B, W)``
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
    """``--schedule early-stop``: drafts the whole block, looks, and applies Algorithm 1.

    After the break the rows shorter than the widest are filled up to it: in a
    padded step that is free, and whether (r, k) lies within a width that was
    settled without x_{r,k} is known without it too.
    """

    name = "early-stop"

    def __init__(self, cost: CostModel | None = None) -> None:
        self.learner = Learner(cost)

    def plan(self, rows: Sequence[RowView]) -> Plan:
        measure = self.learner.unmeasured(rows) if rows else None
        widths = tuple(row.cap if measure is None else min(row.cap, measure) for row in rows)
        self.learner.asked(rows, widths)
        look = any(widths) and (measure is None or any(r.cuts.look for r in rows))
        return Plan(widths=widths, look=look)

    def schedule(
        self,
        rows: Sequence[RowView],
        drafted: Sequence[int],
        confidence: Sequence[Sequence[float]] | None,
    ) -> Schedule:
        allowed = limits(rows, drafted, confidence)
        most = max((length for length, _ in allowed), default=0)
        if confidence is None or not most or not self.learner.cost.known:
            return unpriced(allowed)
        honest = self.learner.honesty.correct(rows, drafted, confidence)
        survival = survivals(honest, allowed)[:, :most]
        seconds = self.learner.seconds(rows, drafted, True, most)
        prices = seconds.tolist()
        chosen = prefix_schedule(survival.tolist(), lambda _, w: float(prices[w - 1]))
        return padded(gains_of(survival.sum(axis=0)), seconds, max(chosen), allowed)

    def observe(self, outcome: Outcome) -> None:
        self.learner.observe(outcome)
