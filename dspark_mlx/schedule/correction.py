"""Corrects predicted round times by what rounds really took.

A profile is made once; the device changes by the minute (heat, battery, other
programs). The factor for a shape is a weighted median of measured / predicted
over the last rounds, nearer shapes and newer rounds counting more: one odd
round moves nothing, a change is seen within about ten rounds and forgotten as
fast. What is steadily particular to one shape (a wrong spot in the profile) is
learned slowly beside it.
"""

from __future__ import annotations

import math

import numpy as np

from .calibration import Floats

WINDOW = 24
AGE = 5.0  # rounds after which a measurement counts 1/e
WIDEST = 64  # wider rows are neither corrected nor learned from
NEAR_WIDTH = np.exp(-np.arange(WIDEST + 1) / 2.0)  # weight by the difference in width
NEAR_ROWS = np.exp(-np.arange(WIDEST + 1) / 1.0)
OTHER_KIND = 0.5  # weight of a round that looked for one that did not, and back
_KINDS = np.array([[0], [1]])
FAR = math.log(1.25)  # a correction that calls for a look at the plain step
BOUND = math.log(8.0)
ODD = 0.5  # most that one round counts in it
FADE = 40.0  # rounds after which what was particular to a shape counts 1/e
SLOWEST = 0.03  # least share of a new residual in what is known of its shape


class _Shapes:
    """What is steadily particular to the shapes of one row count: ``(2, WIDEST)`` each.

    First index: whether the round looked. Second: its widest row's tokens.
    """

    def __init__(self) -> None:
        self.log = np.zeros((2, WIDEST))
        self.seen = np.zeros((2, WIDEST))
        self.when = np.zeros((2, WIDEST))

    def at(self, now: int, widths: int) -> Floats:
        """``(2, widths)``, fading since each shape was last seen."""
        fade = np.exp((self.when[:, :widths] - now) / FADE)
        return np.asarray(self.log[:, :widths] * fade)


class OnlineCorrection:
    """``update`` after each round, ``factors`` before the next. Bounded to [1/8, 8]."""

    def __init__(self) -> None:
        self._log = np.zeros(WINDOW)
        self._rows = np.zeros(WINDOW, dtype=np.int64)
        self._width = np.zeros(WINDOW, dtype=np.int64)
        self._look = np.zeros(WINDOW, dtype=np.int64)
        self._when = np.zeros(WINDOW)
        self._count = 0
        self._shapes: dict[int, _Shapes] = {}
        self._plain: dict[int, int] = {}
        self._off = 0.0
        self._cache: dict[int, Floats] = {}
        self._longest = 0

    def update(self, rows: int, width: int, look: bool, predicted: float, measured: float) -> None:
        """One round of ``rows`` rows, its widest row ``width`` tokens."""
        if not (predicted > 0.0 and measured > 0.0 and width <= WIDEST):
            return
        ratio = min(max(math.log(measured / predicted), -BOUND), BOUND)
        shapes = self._shapes.setdefault(rows, _Shapes())
        at = int(look), width - 1
        fade = math.exp((float(shapes.when[at]) - self._count) / FADE)
        known = float(shapes.log[at]) * fade
        i = self._count % WINDOW
        self._log[i] = ratio - known
        self._rows[i], self._width[i], self._look[i] = rows, width, look
        self._when[i] = self._count
        self._count += 1
        self._cache.clear()
        live = self._live()
        ages = np.exp((self._when[live] - self._count) / AGE)
        order = self._log[live].argsort()
        overall = float(_weighted_median(self._log[live][order], ages[None, order])[0])
        self._off = overall + known
        if width == 1:
            self._plain[rows] = self._count
        share = max(SLOWEST, 1.0 / (float(shapes.seen[at]) + 4.0))
        known += share * min(max(ratio - overall - known, -ODD), ODD)
        shapes.log[at] = min(max(known, -BOUND), BOUND)
        shapes.seen[at] += 1.0
        shapes.when[at] = self._count

    def blind(self, rows: int) -> bool:
        """Whether rounds are far off their predictions and no recent one was plain.

        Then nothing tells whether all steps are slower or only the wide ones,
        which is what the choice of a width hangs on.
        """
        return abs(self._off) > FAR and self._count - self._plain.get(rows, -WINDOW) >= WINDOW

    def _live(self) -> slice:
        return slice(0, min(self._count, WINDOW))

    def factors(self, rows: int, drafted: int, look: bool) -> Floats:
        """Measured over predicted for rounds that verify 0..``drafted`` tokens."""
        done = self._cache.get(rows)
        if done is None or done.shape[1] <= drafted:
            self._longest = max(drafted, self._longest)
            done = self._cache[rows] = self._both(rows, self._longest + 1)
        return np.asarray(done[int(look), : drafted + 1])

    def _both(self, rows: int, count: int) -> Floats:
        """Factors ``(2, count)`` without and with a look."""
        if not self._count:
            return np.ones((2, count))
        live = self._live()
        order = self._log[live].argsort()
        log, look = self._log[live][order], self._look[live][order]
        near = np.exp((self._when[live][order] - self._count) / AGE)
        near *= NEAR_ROWS[np.minimum(np.abs(self._rows[live][order] - rows), WIDEST)]
        away = np.abs(np.arange(1, count + 1)[:, None] - self._width[live][order])
        width = NEAR_WIDTH[np.minimum(away, WIDEST)] * near
        kind = np.where(look == _KINDS, 1.0, OTHER_KIND)
        weights = (kind[:, None, :] * width).reshape(2 * count, -1)
        logs = _weighted_median(log, weights).reshape(2, count)
        shapes = self._shapes.get(rows)
        if shapes is not None:
            n = min(count, WIDEST)
            logs[:, :n] += shapes.at(self._count, n)
        return np.asarray(np.exp(np.minimum(np.maximum(logs, -BOUND), BOUND)))


def _weighted_median(values: Floats, weights: Floats) -> Floats:
    """Sorted ``values (N,)`` under each row of ``weights (M, N)``: ``(M,)``."""
    mass = weights.cumsum(axis=1)
    return np.asarray(values[(mass >= 0.5 * mass[:, -1:]).argmax(axis=1)])
