"""What the next round will take: the measured table, times how the device drifts.

seconds[W] = (step[rows, W, context] + draft + sync) · drift, with one drift a kind of
round: plain, and drafting. A profile is made once; the device changes by the minute
(heat, battery, other programs). ``Prices`` also names the widths that are still to be
measured where there is no profile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .cost import CostModel
from .policy import Floats, Outcome, RowView

# Drift is the running mean of log(measured / predicted): the share of a new round in it, the
# most that one round may move it by, and its bounds. A load shows within 15 rounds and one odd
# round moves a price by 5 % at most (docs/scheduling.md).
DRIFT_RATE, ODD_ROUND, BOUND = 0.2, math.log(1.3), math.log(8.0)
# A plain drift that moved by more since a draft was last made is another state of the device
# (the deviation of single rounds is 3-5 % here): drafting is then taken to drift alike.
MOVED = math.log(1.12)
LADDER = (0, 2, 4)  # drafted tokens tried, in order, while the cost is unknown
LADDER_ROUNDS = 3  # the first of a shape may still compile; a median of three shrugs it off


class Drift:
    """Measured over predicted seconds of one kind of round, lately: ``factor``."""

    def __init__(self) -> None:
        self.log = 0.0

    @property
    def factor(self) -> float:
        return math.exp(self.log)

    def update(self, predicted: float, measured: float) -> None:
        """One round; ``predicted`` without the drift. Seconds."""
        residual = math.log(measured / predicted) - self.log
        step = DRIFT_RATE * min(max(residual, -ODD_ROUND), ODD_ROUND)
        self.log = min(max(self.log + step, -BOUND), BOUND)


class Prices:
    """Prices of whole rounds, corrected by each round observed."""

    def __init__(self, cost: CostModel | None = None) -> None:
        self.cost = cost or CostModel()
        self.plain_drift, self.draft_drift = Drift(), Drift()
        self.moves = 0  # how often the device was found in another state
        self._plain_then = 0.0  # the plain drift when a draft was last made

    def plain(self, rows: Sequence[RowView]) -> float:
        """Seconds of a plain round."""
        return self._plain(rows) * self.plain_drift.factor

    def verifying(self, rows: Sequence[RowView], most: int) -> Floats:
        """Seconds of a round that verifies 0..``most``, without draft and sync: ``(most + 1,)``."""
        return self._verifying(rows, most) * self.draft_drift.factor

    def drafts(self, rows: Sequence[RowView], caps: Sequence[int]) -> Floats:
        """Seconds of drafting 0..K tokens, each row at most its cap: ``(K + 1,)``.

        A draft that is known already takes none, but where one row of a method drafts, its
        proposer runs for those that copy too.
        """
        return self._drafts(rows, caps) * self.draft_drift.factor

    @property
    def sync(self) -> float:
        """Seconds that reading the confidences before verification adds."""
        return self.cost.sync_overhead * self.draft_drift.factor

    def drafting(
        self, rows: Sequence[RowView], widths: Sequence[int], most: int, *, sync: bool
    ) -> Floats:
        """Seconds of a round that drafts ``widths`` and verifies 0..``most``: ``(most + 1,)``."""
        fixed = float(self.drafts(rows, widths)[-1]) + (self.sync if sync else 0.0)
        return np.asarray(self.verifying(rows, most) + fixed)

    def observe(self, outcome: Outcome) -> None:
        """Learn from what a round took."""
        rows, measured = outcome.rows, outcome.round_seconds
        if not rows or not measured > 0.0:
            return
        widest = max(outcome.scheduled)
        drafts = any(outcome.drafted)
        if self.cost.known:
            if drafts:
                seconds = (
                    self._verifying(rows, widest)[widest] + self._drafts(rows, outcome.drafted)[-1]
                )
                seconds += self.cost.sync_overhead * (outcome.draft_seconds > 0.0)
                self.draft_drift.update(float(seconds), measured)
                self._plain_then = self.plain_drift.log
            else:
                self.plain_drift.update(self._plain(rows), measured)
                if abs(self.plain_drift.log - self._plain_then) > MOVED:
                    self.draft_drift.log = self._plain_then = self.plain_drift.log
                    self.moves += 1
        drawn = any(
            n and row.known_confidence is None for row, n in zip(rows, outcome.drafted, strict=True)
        )
        if drawn or not drafts:  # a copy is no price of rounds that draft
            self.cost.learn(len(rows), widest + 1, measured)

    def unmeasured(self, rows: Sequence[RowView]) -> int | None:
        """A width to draft and verify only to learn its price; None when enough is known.

        Climbs while a wider step could pay if every token in it were accepted.
        """
        if self.cost.profiled or len(self.cost.step.get(0, {})) > 1:
            return None
        cap, block = max(row.cap for row in rows), max(row.block for row in rows)
        best = 0.0
        for width in [*(w for w in LADDER if w < block), block]:
            if width > cap:
                return None
            known = self.cost.samples(len(rows), width + 1)
            if not known and width > LADDER[1]:
                price = float(self.cost.steps(len(rows), 0, width)[width])
                if (width + 1) / price <= best:
                    return None
            if known < LADDER_ROUNDS:
                return width
            best = max(best, 1.0 / float(self.cost.steps(len(rows), 0, width)[width]))
        return None

    def _plain(self, rows: Sequence[RowView]) -> float:
        return self.cost.plain(len(rows), max(row.context for row in rows))

    def _verifying(self, rows: Sequence[RowView], most: int) -> Floats:
        context = max(row.context for row in rows)
        return np.asarray(self.cost.steps(len(rows), context, most) + self.cost.overhead)

    def _drafts(self, rows: Sequence[RowView], caps: Sequence[int]) -> Floats:
        counts: dict[str, tuple[int, int]] = {}
        for row, cap in zip(rows, caps, strict=True):
            if cap and row.known_confidence is None:
                n, longest = counts.get(row.method, (0, 0))
                counts[row.method] = n + 1, max(longest, cap)
        most = max(caps)
        total = np.zeros(most + 1)
        for method, (n, longest) in counts.items():
            if n < len(rows):
                n += sum(row.method == method and bool(row.known_confidence) for row in rows)
            if longest == most and len(counts) == 1:
                return self.cost.drafts(method, n, longest)
            seconds = self.cost.drafts(method, n, longest)
            total[: longest + 1] += seconds
            total[longest + 1 :] += seconds[-1]
        return total
