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
NEAR_WIDTH = 2.0
NEAR_ROWS = 1.0
OTHER_KIND = 0.7  # how far a round that looked is from one that did not
FAR = math.log(1.25)  # a correction that calls for a look at the plain step
BOUND = math.log(8.0)
ODD = 0.5  # most that one round counts in it
FADE = 40.0  # rounds after which what was particular to a shape counts 1/e
SLOWEST = 0.03  # least share of a new residual in what is known of its shape


class OnlineCorrection:
    """``update`` after each round, ``factors`` before the next. Bounded to [1/8, 8]."""

    def __init__(self) -> None:
        self._log = np.zeros(WINDOW)
        self._rows = np.zeros(WINDOW)
        self._width = np.zeros(WINDOW)
        self._look = np.zeros(WINDOW, dtype=bool)
        self._when = np.zeros(WINDOW)
        self._count = 0
        self._known: dict[tuple[int, int, bool], tuple[float, int, int]] = {}
        self._cache: dict[int, Floats] = {}
        self._longest = 0

    def update(self, rows: int, width: int, look: bool, predicted: float, measured: float) -> None:
        """One round of ``rows`` rows, its widest row ``width`` tokens."""
        if not (predicted > 0.0 and measured > 0.0):
            return
        ratio = min(max(math.log(measured / predicted), -BOUND), BOUND)
        shape = (rows, width, look)
        _, seen, _ = self._known.get(shape, (0.0, 0, 0))
        known = self._of(shape)
        i = self._count % WINDOW
        self._log[i] = ratio - known
        self._rows[i], self._width[i], self._look[i] = rows, width, look
        self._when[i] = self._count
        self._count += 1
        self._cache.clear()
        live = self._live()
        overall = _weighted_median(self._log[live], self._ages(live)[None, :])[0]
        share = max(SLOWEST, 1.0 / (seen + 4.0))
        known += share * min(max(ratio - overall - known, -ODD), ODD)
        self._known[shape] = (min(max(known, -BOUND), BOUND), seen + 1, self._count)

    def _of(self, shape: tuple[int, int, bool]) -> float:
        """What is particular to a shape, fading since it was last seen."""
        known, _, when = self._known.get(shape, (0.0, 0, 0))
        return known * math.exp((when - self._count) / FADE)

    def blind(self, rows: int) -> bool:
        """Whether rounds are far off their predictions and no recent one was plain.

        Then nothing tells whether all steps are slower or only the wide ones,
        which is what the choice of a width hangs on.
        """
        if not self._count:
            return False
        live = self._live()
        off = _weighted_median(self._log[live], self._ages(live)[None, :])[0]
        shape = (rows, int(self._width[(self._count - 1) % WINDOW]), False)
        off += max(self._of(shape), self._of((*shape[:2], True)), key=abs)
        plain = (self._width[live] == 1.0) & (self._rows[live] == rows)
        return bool(abs(off) > FAR and not plain.any())

    def _live(self) -> slice:
        return slice(0, min(self._count, WINDOW))

    def _ages(self, live: slice) -> Floats:
        return np.asarray(np.exp((self._when[live] - self._count) / AGE))

    def factors(self, rows: int, drafted: int, look: bool) -> Floats:
        """Measured over predicted for rounds that verify 0..``drafted`` tokens."""
        done = self._cache.get(rows)
        if done is None or done.shape[1] <= drafted:
            self._longest = max(drafted, self._longest)
            done = self._cache[rows] = self._both(rows, self._longest + 1)
        return np.asarray(done[int(look), : drafted + 1])

    def _both(self, rows: int, count: int) -> Floats:
        """Factors ``(2, count)`` without and with a look."""
        logs = np.zeros((2, count))
        if self._count:
            live = self._live()
            ages = (self._when[live] - self._count) / AGE
            ages -= np.abs(rows - self._rows[live]) / NEAR_ROWS
            kind = ages - OTHER_KIND * (self._look[live] != np.array([[False], [True]]))
            away = np.abs(np.arange(1, count + 1)[:, None] - self._width[live]) / NEAR_WIDTH
            near = np.exp(kind[:, None, :] - away)
            logs = _weighted_median(self._log[live], near.reshape(2 * count, -1)).reshape(2, count)
        for shape in self._known:
            r, width, look = shape
            if r == rows and width <= count:
                logs[int(look), width - 1] += self._of(shape)
        return np.asarray(np.exp(np.minimum(np.maximum(logs, -BOUND), BOUND)))


def _weighted_median(values: Floats, weights: Floats) -> Floats:
    """``values (N,)`` under each row of ``weights (M, N)``: ``(M,)``."""
    order = values.argsort()
    mass = weights[:, order].cumsum(axis=1)
    return np.asarray(values[order][(mass >= 0.5 * mass[:, -1:]).argmax(axis=1)])
