"""What a draft is worth: calibrated confidences, and the tokens recent drafts have won.

``OnlineCalibrator`` makes c_k mean what it says, per method, from every position that was
verified. ``Acceptance`` keeps for each row the mean *gain curve* of its recent rounds,
gain[W] = Σ_{k≤W} a_k with survival a_k = c_1 · … · c_k: the tokens expected of verifying W.
Both read only rounds that are over, so decisions made from them cannot anticipate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from .policy import Floats, Outcome, RowView

TINY = 1e-6

# The calibrator, σ(s · logit(c_k) + b_k): bounds of slope and shift, what a round is forgotten
# by, the curvature its start counts for, and the cautious start of confidences that nobody
# calibrated. With these the error of survival is under 3 % after 400 verified tokens
# (tests/dspark_mlx/schedule/test_acceptance.py).
SLOPE, SHIFT = (0.2, 1.5), (-4.0, 2.0)
FORGET, PRIOR = 0.99, 4.0
CAUTIOUS = (0.7, -0.5)
# Acceptance of a position that was never verified: as the one before it, this many times; the
# first as one in two.
RATE, RATE_WEIGHT = 0.5, 3.0

# The gain curves: rounds that the mean of a row remembers, and how many of its own weigh as
# much as what it begins with, of its method or a guess. Measured: docs/scheduling.md.
MEMORY, BORROWED, GUESSED = 16.0, 3.0, 2.0
INHERIT = 0.5  # how much of a token's odds, against the usual, those after it share
KEPT_ROWS = 64  # rows remembered after they have left: more than are ever served at once


class _Method:
    """The correction of one method's confidences, by position."""

    def __init__(self, calibrated: bool) -> None:
        slope, self.start = (1.0, 0.0) if calibrated else CAUTIOUS
        self.slope, self.slope_weight = slope, 0.0
        self.shift: Floats = np.zeros(0)
        self.past: Floats = np.zeros((3, 0))  # tokens verified, accepted, and their curvature
        self._rates = self._odds = np.zeros(0)

    def grow(self, length: int) -> None:
        more = length - len(self.shift)
        # A position never seen is as far off as the one before it.
        shift = self.shift[-1] if len(self.shift) else self.start
        self.shift = np.concatenate([self.shift, np.full(more, shift)])
        self.past = np.concatenate([self.past, np.zeros((3, more))], axis=1)
        self._rates = self._odds = np.zeros(0)

    def rates(self, length: int) -> Floats:
        """Chance that each position is accepted given those before it, whatever its confidence."""
        if len(self._rates) < length:
            prior, rates = RATE, []
            seen, accepted, _ = self.past.tolist()
            for n, yes in zip(seen, accepted, strict=True):
                prior = (yes + RATE_WEIGHT * prior) / (n + RATE_WEIGHT)
                rates.append(prior)
            self._rates = np.array(rates)
        return self._rates[:length]

    def odds(self, length: int) -> Floats:
        """The logits of ``rates``."""
        if len(self._odds) < length:
            rates = self.rates(length)
            self._odds = np.log(rates / (1.0 - rates))
        return self._odds[:length]

    def learn(self, x: Floats, seen: Floats, hit: Floats, known: Floats | None) -> None:
        """One damped Newton step on a round's tokens, ``(R, K)`` each.

        ``x`` logits; ``seen`` and ``hit`` 1 where verified, where accepted; ``known
        (R, 1)`` is 0 for rows without confidences, which only count.
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
        self._rates = self._odds = np.zeros(0)


class OnlineCalibrator:
    """Corrections of all methods in use: ``correct`` before a decision, ``observe`` after.

    σ(s·logit(c_k) + b_k), one slope s a method and one shift b_k a position, learned by
    one damped Newton step a round, with forgetting. It is increasing in c, so the order
    of confidences never changes. Copies, whose confidences are known beforehand, are a
    method of their own.
    """

    def __init__(self) -> None:
        self._methods: dict[tuple[str, bool, bool], _Method] = {}

    def _method(self, row: RowView, length: int) -> _Method:
        key = (row.method, row.calibrated, row.known_confidence is not None)
        method = self._methods.get(key)
        if method is None:
            method = self._methods[key] = _Method(row.calibrated)
        if len(method.shift) < length:
            method.grow(length)
        return method

    def rates(self, row: RowView, length: int) -> Floats:
        """Mean acceptance per position ``(length,)``, for where no confidence is known."""
        return self._method(row, length).rates(length)

    def odds(self, row: RowView, length: int) -> Floats:
        """Their logits."""
        return self._method(row, length).odds(length)

    def correct(
        self,
        rows: Sequence[RowView],
        drafted: Sequence[int],
        confidence: Sequence[Sequence[float]] | None,
    ) -> Floats:
        """Calibrated c_k ``(R, K)``, K the longest draft; 0 beyond a row's draft.

        A row without confidences gets its method's mean acceptance per position.
        """
        return self._correct(rows, drafted, *_logits(drafted, confidence))

    def _correct(
        self, rows: Sequence[RowView], drafted: Sequence[int], x: Floats, blank: Sequence[int]
    ) -> Floats:
        width = x.shape[1]
        methods = [self._method(row, width) for row in rows]
        first = methods[0] if methods else None
        if first is not None and all(method is first for method in methods):
            y = first.slope * x + first.shift[:width]
        else:
            slope = np.array([method.slope for method in methods]).reshape(-1, 1)
            y = slope * x + np.array([m.shift[:width] for m in methods]).reshape(x.shape)
        out = 1.0 / (1.0 + np.exp(-y))
        for r, n in enumerate(drafted):
            if n < width:
                out[r, n:] = 0.0
        for r in blank:
            out[r, : drafted[r]] = methods[r].rates(width)[: drafted[r]]
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
        mine: dict[_Method, list[int]] = {}
        for r, row in enumerate(outcome.rows):
            mine.setdefault(self._method(row, most), []).append(r)
        for method, rows in mine.items():
            sure = None if known is None else known[rows]
            method.learn(x[rows, :most], verified[rows], accepted[rows], sure)


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


class _Curve:
    """A running mean of gain curves ``(block + 1,)``; the first rounds weigh the most."""

    __slots__ = ("mean", "rounds", "start")

    def __init__(self, mean: Floats, start: float) -> None:
        self.mean, self.start, self.rounds = mean, start, 0

    def push(self, gain: Floats) -> None:
        self.rounds += 1
        weight = max(1.0 / (self.rounds + self.start), 1.0 / MEMORY)
        self.mean = self.mean + weight * (gain - self.mean)


class Acceptance:
    """Gain curves per row, begun with the mean of the row's method, or a guess."""

    def __init__(self) -> None:
        self.calibrator = OnlineCalibrator()
        self._rows: dict[str, _Curve] = {}
        self._methods: dict[tuple[str, int], _Curve] = {}

    def gains(self, row: RowView) -> Floats:
        """Tokens expected of verifying 0..block of the row's next draft: ``(block + 1,)``.

        Exact, up to calibration, where the confidences are known; else the mean of recent rounds.
        """
        if row.known_confidence is not None:
            known = row.known_confidence
            gains = np.zeros(len(known) + 1)
            if known:
                c = self.calibrator.correct((row,), (len(known),), (known,))[0]
                np.multiply.accumulate(c).cumsum(out=gains[1:])
            return gains
        return self._curve(row).mean

    def observe(self, outcome: Outcome) -> Floats:
        """Learn from a round; returns its gain curves ``(R, K + 1)``, K the largest block.

        A draft shorter than the block is taken to have gone on as its method usually does.
        """
        confidence = self.calibrator.observe(outcome)
        blocks = [
            row.block if n else 0 for row, n in zip(outcome.rows, outcome.drafted, strict=True)
        ]
        gains = np.zeros((len(blocks), max(blocks, default=0) + 1))
        width = min(confidence.shape[1], gains.shape[1] - 1)
        won = np.multiply.accumulate(confidence[:, :width], axis=1)
        np.add.accumulate(won, axis=1, out=gains[:, 1 : width + 1])
        gains[:, width + 1 :] = gains[:, width : width + 1]
        for r, (row, n) in enumerate(zip(outcome.rows, outcome.drafted, strict=True)):
            if not n or row.known_confidence is not None:  # says nothing of what is drafted
                continue
            if n < row.block:
                gains[r, n : row.block + 1] = self._extended(row, confidence[r, :n], gains[r])
                gains[r, row.block + 1 :] = gains[r, row.block]
            gain = gains[r, : row.block + 1]
            self._curve(row).push(gain)
            self._methods[row.method, row.block].push(gain)
        return gains

    def _extended(self, row: RowView, confidence: Floats, gain: Floats) -> Floats:
        """Tokens won by verifying n..block of a draft of n tokens, as if it had gone on.

        The tokens not drafted have their usual odds, moved half as far as the last drafted
        one was from its own: text that is easy stays easy.
        """
        n, usual = len(confidence), self.calibrator.odds(row, row.block)
        last = min(max(float(confidence[-1]), 0.01), 0.99)
        ahead = usual[n:] + INHERIT * (math.log(last / (1.0 - last)) - float(usual[n - 1]))
        reached = gain[n] - gain[n - 1]
        more = reached * np.multiply.accumulate(1.0 / (1.0 + np.exp(-ahead)))
        return np.concatenate([gain[n : n + 1], gain[n] + np.add.accumulate(more)])

    def _curve(self, row: RowView) -> _Curve:
        """The row's curve, for its present block."""
        own = self._rows.get(row.request_id)
        if own is None or len(own.mean) != row.block + 1:
            key = (row.method, row.block)
            method = self._methods.get(key)
            if method is None:
                guess = np.zeros(row.block + 1)
                np.cumsum(np.cumprod(self.calibrator.rates(row, row.block)), out=guess[1:])
                method = self._methods[key] = _Curve(guess, GUESSED)
            start = BORROWED if method.rounds else GUESSED
            own = self._rows[row.request_id] = _Curve(method.mean, start)
            while len(self._rows) > KEPT_ROWS:
                del self._rows[next(iter(self._rows))]
        return own
