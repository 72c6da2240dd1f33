"""What every policy that learns shares: prices, honest confidences, recent rounds.

Owns the objects that remember (cost, correction, honesty, history) and updates
them from each outcome. Decides nothing about lengths, except which widths are
still to be measured while nothing is known of the cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .calibration import Floats
from .correction import OnlineCorrection
from .cost import CostModel
from .history import History
from .honesty import Honesty
from .policy import Outcome, RowView

LADDER = (0, 2, 4)  # drafted tokens tried, in order, while the cost is unknown
LADDER_ROUNDS = 3  # the first of a shape may still compile; a median of three shrugs it off


class Learner:
    """The memory of a policy."""

    def __init__(self, cost: CostModel | None = None) -> None:
        self.cost = cost or CostModel()
        self.correction = OnlineCorrection()
        self.honesty = Honesty()
        self.history = History(self.honesty)
        self._asked: dict[str, int] = {}
        self._drafts = False  # whether any draft had to be made

    # -- prices -------------------------------------------------------------------------

    def step(self, rows: Sequence[RowView], drafted: int) -> Floats:
        """Seconds of target step and overhead for verifying 0..``drafted``, uncorrected."""
        context = max(row.context for row in rows)
        return self.cost.steps(len(rows), context, drafted) + self.cost.overhead

    def plain(self, rows: Sequence[RowView]) -> float:
        """Seconds of a plain round in a row of them, uncorrected."""
        return self.cost.plain(len(rows), max(row.context for row in rows))

    def draft(self, rows: Sequence[RowView], widths: Sequence[int] | None, most: int) -> Floats:
        """Seconds of drafting 0..``most`` tokens for those ``rows`` that have a width.

        Nothing for a draft that is there already, nor beyond what its rows may want of a
        proposer; but where one row of a method drafts, the drafter runs for those that copy too.
        """
        counts: dict[str, tuple[int, int]] = {}
        for r, row in enumerate(rows):
            width = widths[r] if widths is not None else row.cap
            if width and row.foreseen is None:
                n, longest = counts.get(row.method, (0, 0))
                counts[row.method] = n + 1, max(longest, width)
        total = np.zeros(most + 1)
        for method, (n, longest) in counts.items():
            n += sum(row.method == method and bool(row.foreseen) for row in rows)
            seconds = self.cost.drafts(method, n, min(most, longest))
            total[: len(seconds)] += seconds
            total[len(seconds) :] += seconds[-1]
        return total

    def gains(self, row: RowView) -> Floats:
        """Expected tokens won by verifying 0..block of a foreseen draft: ``(block + 1,)``."""
        chances = row.foreseen or ()
        gains = np.zeros(len(chances) + 1)
        if chances:
            honest = self.honesty.correct((row,), (len(chances),), (chances,))[0]
            np.multiply.accumulate(honest).cumsum(out=gains[1:])
        return gains

    def seconds(
        self, rows: Sequence[RowView], drafted: Sequence[int], look: bool, most: int
    ) -> Floats:
        """Corrected seconds of a round that drafts ``drafted`` and verifies 0..``most``."""
        widest = max(drafted, default=0)
        fixed = float(self.draft(rows, drafted, widest)[widest]) + self.cost.look * look
        return (self.step(rows, most) + fixed) * self.correction.factors(len(rows), most, look)

    # -- what rounds teach --------------------------------------------------------------

    def asked(self, rows: Sequence[RowView], widths: Sequence[int]) -> None:
        """Remember what a plan asked each row's proposer for."""
        self._asked = {row.request_id: widths[r] for r, row in enumerate(rows)}

    def observe(self, outcome: Outcome) -> Floats:
        """Learn from a round; returns its honest confidences ``(R, K)``."""
        rows = outcome.rows
        if not rows:
            return np.zeros((0, 0))
        asked = [
            max(self._asked.get(row.request_id, 0), outcome.drafted[r])
            for r, row in enumerate(rows)
        ]
        widest = max(outcome.scheduled)
        look = outcome.draft_seconds > 0.0
        if self.cost.known and outcome.round_seconds > 0.0:
            drafted = max(outcome.drafted)
            if outcome.overlapped:
                predicted = self.plain(rows)
            else:
                predicted = float(self.step(rows, widest)[widest]) + self.cost.look * look
            predicted += float(self.draft(rows, outcome.drafted, drafted)[drafted])
            self.correction.update(len(rows), widest + 1, look, predicted, outcome.round_seconds)
        free = [row.foreseen is not None for row, n in zip(rows, outcome.drafted, strict=True) if n]
        self._drafts = self._drafts or not all(free)
        if not (self._drafts and free and all(free)):  # a copy is no price of drafted rounds
            self.cost.learn(len(rows), widest + 1, outcome.round_seconds)
        honest = self.honesty.observe(outcome)
        self.history.observe(outcome, asked, honest)
        return honest

    # -- before anything was measured ---------------------------------------------------

    def unmeasured(self, rows: Sequence[RowView]) -> int | None:
        """A width to draft and verify only to learn its price, or None when enough is known.

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
            price = float(self.cost.steps(len(rows), 0, width)[width])
            best = max(best, 1.0 / price)
        return None
