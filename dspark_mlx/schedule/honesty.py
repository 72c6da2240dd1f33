"""Keeps confidences honest while the engine runs, for every proposer.

Each position that was verified tells whether its confidence was right. From
these a logistic correction σ(s·logit(c_k) + b_k) is learned per method, one
slope s for all positions and one shift b_k each, by one damped Newton step a
round over all its tokens, with forgetting. It is bounded and increasing in c, so the order of
confidences never changes. Confidences that were never calibrated start from a
cautious correction and are marked as their own kind. It reads only rounds that
are over, so it cannot anticipate.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from .calibration import TINY, Floats
from .policy import Outcome, RowView

SLOPE = (0.2, 1.5)
SHIFT = (-4.0, 2.0)
FORGET = 0.99
PRIOR = 4.0  # how much curvature the start counts for
CAUTIOUS = (0.7, -0.5)  # slope and shift of a confidence nobody calibrated
RATE = 0.5  # acceptance of a proposer that was never seen
RATE_WEIGHT = 3.0


class _Kind:
    """The correction of one method's confidences, by position."""

    def __init__(self, calibrated: bool) -> None:
        slope, self.start = (1.0, 0.0) if calibrated else CAUTIOUS
        self.slope, self.slope_weight = slope, 0.0
        self.shift: Floats = np.zeros(0)
        self.past: Floats = np.zeros((3, 0))  # tokens verified, accepted, and their curvature
        self._rates: Floats = np.zeros(0)

    def grow(self, length: int) -> None:
        more = length - len(self.shift)
        # A position never seen is as far off as the one before it.
        shift = self.shift[-1] if len(self.shift) else self.start
        self.shift = np.concatenate([self.shift, np.full(more, shift)])
        self.past = np.concatenate([self.past, np.zeros((3, more))], axis=1)
        self._rates = np.zeros(0)

    def rates(self, length: int) -> Floats:
        """Chance that each position survives given those before it, whatever its confidence."""
        if len(self._rates) < length:
            prior, rates = RATE, []
            seen, accepted, _ = self.past.tolist()
            for n, yes in zip(seen, accepted, strict=True):
                prior = (yes + RATE_WEIGHT * prior) / (n + RATE_WEIGHT)
                rates.append(prior)
            self._rates = np.array(rates)
        return self._rates[:length]

    def learn(self, x: Floats, seen: Floats, hit: Floats, known: Floats | None) -> None:
        """One round's tokens, ``(R, K)`` each: logits, and 1 where verified, where accepted.

        ``known (R, 1)`` is 0 for rows without confidences: they only count.
        """
        n = x.shape[1]
        p = 1.0 / (1.0 + np.exp(-(self.slope * x + self.shift[:n])))
        now = np.empty((4, *x.shape))
        now[0], now[1] = seen, hit
        if known is not None:
            seen, hit = seen * known, hit * known
        pull = seen * p
        np.multiply(pull, 1.0 - pull, out=now[2])
        np.subtract(hit, pull, out=now[3])
        sums = np.add.reduce(now, axis=1)
        past = self.past[:, :n]
        past *= FORGET ** sums[0]
        past += sums[:3]
        shift = self.shift[:n] + sums[3] / (past[2] + PRIOR)
        self.shift[:n] = np.minimum(np.maximum(shift, SHIFT[0]), SHIFT[1])
        forget = FORGET ** float(np.add.reduce(sums[0]))
        self.slope_weight = forget * self.slope_weight + float(np.vdot(now[2], x * x))
        slope = self.slope + float(np.vdot(now[3], x)) / (self.slope_weight + PRIOR * 4.0)
        self.slope = min(max(slope, SLOPE[0]), SLOPE[1])
        self._rates = np.zeros(0)


class Honesty:
    """Corrections of all methods in use. ``correct`` before a decision, ``observe`` after."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, bool, bool], _Kind] = {}

    def _kind(self, row: RowView, length: int) -> _Kind:
        key = (row.method, row.calibrated, row.foreseen is not None)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(row.calibrated)
        if len(kind.shift) < length:
            kind.grow(length)
        return kind

    def rates(self, row: RowView, length: int) -> Floats:
        """Mean chance per position ``(length,)``, for where no confidence is known."""
        return self._kind(row, length).rates(length)

    def correct(
        self,
        rows: Sequence[RowView],
        drafted: Sequence[int],
        confidence: Sequence[Sequence[float]] | None,
    ) -> Floats:
        """Honest c_k ``(R, K)``, K the longest draft; 0 beyond a row's draft.

        A row without confidences gets its method's mean acceptance per position.
        """
        return self._correct(rows, drafted, *_logits(drafted, confidence))

    def _correct(
        self, rows: Sequence[RowView], drafted: Sequence[int], x: Floats, blank: Sequence[int]
    ) -> Floats:
        width = x.shape[1]
        kinds = [self._kind(row, width) for row in rows]
        first = kinds[0] if kinds else None
        if first is not None and all(kind is first for kind in kinds):
            y = first.slope * x + first.shift[:width]
        else:
            slope = np.array([kind.slope for kind in kinds]).reshape(-1, 1)
            y = slope * x + np.array([kind.shift[:width] for kind in kinds]).reshape(x.shape)
        out = 1.0 / (1.0 + np.exp(-y))
        for r, n in enumerate(drafted):
            if n < width:
                out[r, n:] = 0.0
        for r in blank:
            out[r, : drafted[r]] = kinds[r].rates(width)[: drafted[r]]
        return np.asarray(out)

    def observe(self, outcome: Outcome) -> Floats:
        """Learn from a round; returns its confidences as ``correct`` would now."""
        rows, drafted = outcome.rows, outcome.drafted
        x, blank = _logits(drafted, outcome.confidence)
        if any(outcome.scheduled):
            self._learn(outcome, x, blank)
        return self._correct(rows, drafted, x, blank)

    def _learn(self, outcome: Outcome, x: Floats, blank: Sequence[int]) -> None:
        most = max(outcome.scheduled)
        counts = zip(outcome.scheduled, outcome.accepted, outcome.committed, strict=True)
        # A reply that ended inside its draft shows no rejection.
        seen = [min(done + (committed > done), n) for n, done, committed in counts]
        done = [min(a, b) for a, b in zip(outcome.accepted, seen, strict=True)]
        leading = _leading(most)
        verified, accepted = leading[seen], leading[done]
        known = None
        if blank:
            known = np.ones((len(seen), 1))
            known[blank] = 0.0
        mine: dict[_Kind, list[int]] = {}
        for r, row in enumerate(outcome.rows):
            mine.setdefault(self._kind(row, most), []).append(r)
        if len(mine) == 1:
            next(iter(mine)).learn(x[:, :most], verified, accepted, known)
            return
        for kind, rows in mine.items():
            sure = None if known is None else known[rows]
            kind.learn(x[rows, :most], verified[rows], accepted[rows], sure)


@functools.cache
def _leading(width: int) -> Floats:
    """Row n has n ones, then zeros: ``(width + 1, width)``."""
    return np.tri(width + 1, width, -1)


def _logits(
    drafted: Sequence[int], confidence: Sequence[Sequence[float]] | None
) -> tuple[Floats, list[int]]:
    """Logits ``(R, K)`` of the confidences of each row's draft, and the rows without any."""
    width = max(drafted, default=0)
    blank, table = [], []
    none = (0.5,) * width
    for r, n in enumerate(drafted):
        given = confidence[r] if confidence else ()
        if len(given) < n:
            blank.append(r)
            given = ()
        row = tuple(given[:n])
        table.append(row if len(row) == width else row + none[len(row) :])
    c = np.minimum(np.maximum(np.array(table).reshape(len(table), width), TINY), 1.0 - TINY)
    return np.log(c / (1.0 - c)), blank
