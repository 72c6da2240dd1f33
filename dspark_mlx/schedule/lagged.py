"""The asynchronous scheduler of §5.2: capacity from predictions two rounds old.

A global search over the measured staircase, so no cliff traps it, but over
survivals that were known two rounds ago: the width of this round is settled
before its draft exists, which makes it lossless, and lets draft and
verification be one graph without a look in between. The paper caps the tokens
of a batch and admits by current survival; rows here are padded, the cap is a
width, and every token within it is admitted because it costs nothing more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from .calibration import Floats
from .cost import CostModel
from .cuts import any_looks, limits
from .learner import Learner
from .optimum import per_round
from .padded import padded
from .policy import Outcome, Plan, RowView, Schedule
from .reasons import unpriced

LAG = 2


class Lagged:
    """``--schedule lagged``. A row without predictions that old counts with its forecast."""

    name = "lagged"

    def __init__(self, cost: CostModel | None = None) -> None:
        self.learner = Learner(cost)
        self._past: deque[dict[str, Floats]] = deque(maxlen=LAG)
        self._width: int | None = None

    def plan(self, rows: Sequence[RowView]) -> Plan:
        caps = tuple(row.cap for row in rows)
        measure = self.learner.unmeasured(rows) if rows else None
        self._width = None
        if measure is not None:
            caps = tuple(min(cap, measure) for cap in caps)
        elif any(caps) and self.learner.cost.known:
            self._width = self._capacity(rows, caps)
        self.learner.asked(rows, caps)
        return Plan(widths=caps, look=any_looks(rows))

    def _capacity(self, rows: Sequence[RowView], caps: Sequence[int]) -> int:
        most = max(caps)
        gains = self.gains(rows, most)
        seconds = self.learner.seconds(rows, caps, any_looks(rows), most)
        return per_round(len(rows), gains, seconds)

    def gains(self, rows: Sequence[RowView], most: int) -> Floats:
        """Expected tokens won by each width, by what was predicted ``LAG`` rounds ago."""
        old = self._past[0] if len(self._past) == LAG else {}
        total = np.zeros(most + 1)
        for row in rows:
            if not row.cap:
                continue
            gain = old.get(row.request_id)
            if row.foreseen is not None:  # from the text before it, like what is old
                gain = self.learner.gains(row)
            elif gain is None:
                gain = self.learner.history.ring(row).mean
            gain = gain[: row.cap + 1]
            n = min(len(gain), most + 1)
            total[:n] += gain[:n]
            total[n:] += gain[n - 1]
        return total

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
        seconds = self.learner.seconds(rows, drafted, confidence is not None, most)
        return padded(self.gains(rows, most), seconds, min(self._width, most), allowed)

    def observe(self, outcome: Outcome) -> None:
        honest = self.learner.observe(outcome)
        gains = np.multiply.accumulate(honest, axis=1).cumsum(axis=1)
        self._past.append(
            {
                row.request_id: np.concatenate([[0.0], gains[r, : outcome.drafted[r]]])
                for r, row in enumerate(outcome.rows)
                if outcome.drafted[r] and row.foreseen is None
            }
        )
