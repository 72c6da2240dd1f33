"""Keeps confidences honest while the engine runs, for every proposer.

Each position that was verified tells whether its confidence was right. From
these a logistic correction σ(s·logit(c_k) + b_k) is learned per method, one
slope s for all positions and one shift b_k each, by a Newton step per
observation with forgetting. It is bounded and increasing in c, so the order of
confidences never changes. Confidences that were never calibrated start from a
cautious correction and are marked as their own kind. It reads only rounds that
are over, so it cannot anticipate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .calibration import TINY, Floats, logit, sigmoid
from .policy import Outcome, RowView

SLOPE = (0.2, 1.5)
SHIFT = (-4.0, 2.0)
FORGET = 0.99
PRIOR = 4.0  # how much curvature the start counts for
CAUTIOUS = (0.7, -0.5)  # slope and shift of a confidence nobody calibrated
RATE = 0.6  # acceptance of a proposer that was never seen
RATE_WEIGHT = 3.0


class _Kind:
    """The correction of one method's confidences."""

    def __init__(self, calibrated: bool) -> None:
        slope, shift = (1.0, 0.0) if calibrated else CAUTIOUS
        self.slope, self.slope_weight = slope, 0.0
        self.start = shift
        self.shift: list[float] = []
        self.shift_weight: list[float] = []
        self.accepted: list[float] = []
        self.seen: list[float] = []

    def grow(self, length: int) -> None:
        while len(self.shift) < length:
            # A position never seen is as far off as the one before it.
            self.shift.append(self.shift[-1] if self.shift else self.start)
            self.shift_weight.append(0.0)
            self.accepted.append(0.0)
            self.seen.append(0.0)

    def rates(self, length: int) -> list[float]:
        """Chance that each position survives given those before it, whatever its confidence."""
        rates, prior = [], RATE
        for k in range(length):
            prior = (self.accepted[k] + RATE_WEIGHT * prior) / (self.seen[k] + RATE_WEIGHT)
            rates.append(prior)
        return rates

    def learn(self, k: int, confidence: float | None, accepted: bool) -> None:
        self.accepted[k] = FORGET * self.accepted[k] + accepted
        self.seen[k] = FORGET * self.seen[k] + 1.0
        if confidence is None:
            return
        c = min(max(confidence, TINY), 1.0 - TINY)
        x = math.log(c / (1.0 - c))
        p = 1.0 / (1.0 + math.exp(-(self.slope * x + self.shift[k])))
        miss, bend = accepted - p, p * (1.0 - p)
        self.shift_weight[k] = FORGET * self.shift_weight[k] + bend
        shift = self.shift[k] + miss / (self.shift_weight[k] + PRIOR)
        self.shift[k] = min(max(shift, SHIFT[0]), SHIFT[1])
        self.slope_weight = FORGET * self.slope_weight + bend * x * x
        slope = self.slope + miss * x / (self.slope_weight + PRIOR * 4.0)
        self.slope = min(max(slope, SLOPE[0]), SLOPE[1])


class Honesty:
    """Corrections of all methods in use. ``correct`` before a decision, ``observe`` after."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, bool], _Kind] = {}

    def _kind(self, row: RowView, length: int) -> _Kind:
        key = (row.method, row.calibrated)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(row.calibrated)
        if len(kind.shift) < length:
            kind.grow(length)
        return kind

    def rates(self, row: RowView, length: int) -> Floats:
        """Mean chance per position ``(length,)``, for where no confidence is known."""
        return np.array(self._kind(row, length).rates(length))

    def correct(
        self,
        rows: Sequence[RowView],
        drafted: Sequence[int],
        confidence: Sequence[Sequence[float]] | None,
    ) -> Floats:
        """Honest c_k ``(R, K)``, K the longest draft; 0 beyond a row's draft.

        A row without confidences gets its method's mean acceptance per position.
        """
        width = max(drafted, default=0)
        raw = np.zeros((len(rows), width))
        shift = np.zeros((len(rows), width))
        slope = np.ones((len(rows), 1))
        blank: list[int] = []
        for r, row in enumerate(rows):
            n = drafted[r]
            given = confidence[r] if confidence else ()
            if not n:
                continue
            if len(given) < n:
                blank.append(r)
                continue
            kind = self._kind(row, n)
            raw[r, :n] = given[:n]
            shift[r, :n] = kind.shift[:n]
            slope[r] = kind.slope
        out = sigmoid(slope * logit(raw) + shift)
        out[np.arange(width) >= np.asarray(drafted)[:, None]] = 0.0
        for r in blank:
            out[r, : drafted[r]] = self.rates(rows[r], drafted[r])
        return out

    def observe(self, outcome: Outcome) -> None:
        for r, row in enumerate(outcome.rows):
            n, done = outcome.scheduled[r], outcome.accepted[r]
            if not n:
                continue
            # A reply that ended inside its draft shows no rejection.
            seen = min(done + 1, n) if outcome.committed[r] > done else min(done, n)
            kind = self._kind(row, n)
            given = outcome.confidence[r] if outcome.confidence else ()
            for k in range(seen):
                kind.learn(k, given[k] if k < len(given) else None, k < done)
