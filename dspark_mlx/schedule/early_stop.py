"""Algorithm 1 of the paper (§3.2.2): greedy admission that stops at the first loss.

Candidates of all rows are admitted in descending survival while tokens per
second rise. The break keeps it lossless: the candidate (r, k) is judged by
survivals that x_{r,k} has no part in, as appendix A demands. It finds the
optimum when throughput has one peak and may stop short before a cliff.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .calibration import Floats
from .cost import CostModel
from .cuts import limit
from .learner import Learner
from .policy import Outcome, Plan, RowView, Schedule
from .reasons import kept, trimmed, unpriced


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
    candidates = [
        (-a, r, j) for r, row in enumerate(survival) for j, a in enumerate(row, 1) if a > 0
    ]
    candidates.sort()  # equal survivals: by row, then by position, whatever their tokens
    batch, expected, widest = rows, float(rows), 0
    best = expected / seconds(batch, 1)
    for minus_a, r, j in candidates:
        batch, expected, widest = batch + 1, expected - minus_a, max(widest, j)
        throughput = expected / seconds(batch, widest + 1)
        if throughput <= best:
            break
        best = throughput
        lengths[r] = j
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
        limits = [
            limit(row, n, confidence[r] if confidence else None)
            for r, (row, n) in enumerate(zip(rows, drafted, strict=True))
        ]
        most = max((length for length, _ in limits), default=0)
        if confidence is None or not most or not self.learner.cost.known:
            return unpriced(limits)
        honest = self.learner.honesty.correct(rows, drafted, confidence)
        survival = np.asarray(np.cumprod(honest, axis=1), np.float64)
        for r, (length, _) in enumerate(limits):
            survival[r, length:] = 0.0
        seconds = self.learner.seconds(rows, drafted, True, most)
        prices = seconds.tolist()
        chosen = prefix_schedule(survival.tolist(), lambda _, w: float(prices[w - 1]))
        return padded(rows, survival, seconds, max(chosen), limits)

    def observe(self, outcome: Outcome) -> None:
        self.learner.observe(outcome)


def padded(
    rows: Sequence[RowView],
    survival: Floats,
    seconds: Floats,
    width: int,
    limits: Sequence[tuple[int, str]],
) -> Schedule:
    """The schedule in which every row verifies up to ``width``, with its reasons and curves.

    ``survival (R, K)`` is 0 beyond each row's limit; ``seconds[W]`` the round.
    """
    gains = np.zeros(len(seconds))
    gains[1:] = np.cumsum(survival.sum(axis=0))[: len(seconds) - 1]
    curve = ((len(rows) + gains) / seconds).tolist()
    cut = trimmed(gains, seconds, width)
    lengths = tuple(min(width, length) for length, _ in limits)
    return Schedule(
        lengths=lengths,
        reasons=tuple(
            cut if width < length else kept(length, why, width) for length, why in limits
        ),
        curves=tuple(tuple(curve[: length + 1]) for length, _ in limits),
        predicted_seconds=float(seconds[width]),
        predicted_tps=curve[width],
    )
