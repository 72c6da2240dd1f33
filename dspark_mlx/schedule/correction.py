"""Corrects predicted round times by what rounds really took.

A profile is made once; the device changes by the minute (heat, battery, other
programs). The factor for a shape is a weighted median of measured / predicted
over the last rounds, nearer shapes and newer rounds counting more: one odd
round moves nothing, a change is seen within about ten rounds and forgotten as
fast. What is steadily particular to one shape (a wrong spot in the profile) is
learned slowly beside it, and only holds for the state of the device it was seen
in: load does not slow every width alike, so when rounds leave what others of their
own shape took, what was particular before is forgotten. Else shapes that were not
visited since would keep the price of a load that is gone.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import takewhile
from statistics import median

import numpy as np

from .calibration import Floats

AGE = 5.0  # rounds after which a measurement counts 1/e
WINDOW = 16  # rounds kept; older ones would count next to nothing
PLAIN_WITHIN = 24  # rounds in which a far correction wants a plain one
WIDEST = 64  # wider rows are neither corrected nor learned from
OTHER_KIND = 0.5  # weight of a round that looked for one that did not, and back
_W = np.arange(WIDEST)
NEAR = np.exp(-np.abs(_W[:, None] - _W) / 2.0)  # weight of a width (first) for another
NEAR = np.stack([np.stack([NEAR, OTHER_KIND * NEAR], 1), np.stack([OTHER_KIND * NEAR, NEAR], 1)])
NEAR = NEAR.reshape(2 * WIDEST, 2, WIDEST)  # by whether each looked, too
NEAR_ROWS = np.exp(-np.abs(_W[:, None] - _W) / 1.0)
# Weight of the round in each place of the ring when the last one went to place p: ``AGES[p]``.
AGES = np.exp(-(1 + (np.arange(WINDOW)[:, None] - np.arange(WINDOW)) % WINDOW) / AGE)
FAR = math.log(1.25)  # a correction that calls for a look at the plain step
MOVED = math.log(1.12)  # a change that is no noise: the device is in another state
JUMPS = 4  # rounds, each against earlier ones of its own shape, that show it; one may be missing
BOUND = math.log(8.0)
ODD = 0.5  # most that one round counts in what is particular to a shape
FADE = 40.0  # rounds after which that counts 1/e
SLOWEST = 0.03  # least share of a new residual in what is known of its shape
USUAL = math.log(1.2)  # most that a profile is taken to be wrong about one shape for good
USUAL_SHARE = 0.05  # of a new residual in that, at least


class _Shapes:
    """What is steadily particular to the shapes of one row count: ``(2, WIDEST)`` each.

    First index: whether the round looked. Second: its widest row's tokens.
    """

    def __init__(self) -> None:
        self.log = np.zeros((2, WIDEST))
        self.seen = np.zeros((2, WIDEST))
        self.when = np.zeros((2, WIDEST))
        self.usual = np.zeros((2, WIDEST))
        self.often = np.zeros((2, WIDEST))

    def at(self, now: int, widths: int) -> Floats:
        """``(2, widths)``, fading since each shape was last seen, but for what is usual."""
        fade = np.exp((self.when[:, :widths] - now) / FADE)
        return np.asarray(self.log[:, :widths] * fade + self.usual[:, :widths])

    def particular(self, at: tuple[int, int], now: int) -> float:
        """What is known of one shape beside what is usual."""
        return float(self.log[at]) * math.exp((float(self.when[at]) - now) / FADE)

    def learn(
        self, at: tuple[int, int], now: int, known: float, residual: float, usual: bool
    ) -> None:
        """One round of a shape of which ``known`` was known left ``residual`` unexplained.

        ``usual``: whether the device is about as fast as when it was profiled.
        """
        seen = float(self.seen[at])
        known += max(SLOWEST, 1.0 / (seen + 4.0)) * residual
        self.log[at] = min(max(known, -BOUND), BOUND)
        self.seen[at], self.when[at] = seen + 1.0, now
        if usual:
            # The first rounds of a load look like a wrong profile: no round says much of it.
            often, residual = float(self.often[at]), min(max(residual, -MOVED), MOVED)
            wrong = float(self.usual[at]) + max(USUAL_SHARE, 1.0 / (often + 4.0)) * residual
            self.usual[at] = min(max(wrong, -USUAL), USUAL)
            self.often[at] = often + 1.0

    def forget(self) -> None:
        """Another state of the device: what the profile is usually wrong by still holds."""
        self.log[:] = self.seen[:] = 0.0


class OnlineCorrection:
    """``update`` after each round, ``factors`` before the next. Bounded to [1/8, 8].

    ``moves`` counts how often rounds left what others of their own shape had
    taken. Shapes are never compared with each other for it: the widths in use
    change with the text, and a table that is wrong about some is no load.
    """

    def __init__(self) -> None:
        self.moves = 0
        self._log = np.zeros(WINDOW)  # what is left of each round beside its shape's own
        self._known = np.zeros(WINDOW)  # and that
        self._rows = np.zeros(WINDOW, dtype=np.int64)
        self._shape = np.zeros(WINDOW, dtype=np.int64)  # its place in NEAR
        self._ages: Floats = np.zeros(0)
        self._count = 0
        self._shapes: dict[int, _Shapes] = {}
        self._plain: dict[int, int] = {}
        self._off = 0.0
        self._jumps: deque[float] = deque(maxlen=JUMPS)
        self._since = 0  # the round with which the device's present state began
        self._cache: dict[int, Floats] = {}
        self._longest = 0

    def update(self, rows: int, width: int, look: bool, predicted: float, measured: float) -> None:
        """One round of ``rows`` rows, its widest row ``width`` tokens."""
        if not (predicted > 0.0 and measured > 0.0 and width <= WIDEST):
            return
        ratio = min(max(math.log(measured / predicted), -BOUND), BOUND)
        at = int(look), width - 1
        shapes = self._shapes.setdefault(rows, _Shapes())
        ratio -= float(shapes.usual[at])
        known = shapes.particular(at, self._count)
        shape = look * WIDEST + width - 1
        moved = self._moved(_row(rows), shape, ratio)
        i = self._count % WINDOW
        self._log[i], self._known[i] = ratio - known, known
        self._rows[i], self._shape[i] = _row(rows), shape
        self._count += 1
        self._cache.clear()
        if moved:
            self._forget()
            known = 0.0
        self._ages = self._aged()
        level = self._overall()
        self._off = level + known + float(shapes.usual[at])
        if width == 1:
            self._plain[rows] = self._count
        residual = min(max(ratio - level - known, -ODD), ODD)
        shapes.learn(at, self._count, known, residual, usual=abs(level) < FAR)

    def _moved(self, row: int, shape: int, ratio: float) -> bool:
        """Whether the last rounds all left what their shapes took before."""
        live, ages = self._live, self._ages
        same = (self._rows[:live] == row) & (self._shape[:live] == shape) & (ages > 0.0)
        if np.count_nonzero(same) >= 2:
            self._jumps.append(ratio - median((self._log[:live] + self._known[:live])[same]))
        return len(self._jumps) >= JUMPS - 1 and abs(median(self._jumps)) > MOVED

    def _overall(self) -> float:
        """The level of the last rounds, whatever their shapes."""
        order = self._log[: self._live].argsort()
        return float(_weighted_median(self._log[order], self._ages[order, None])[0])

    def _forget(self) -> None:
        """Another state of the device: only the rounds that showed it still count."""
        self.moves += 1
        for shapes in self._shapes.values():
            shapes.forget()
        self._log += self._known
        self._known[:] = 0.0
        middle = median(self._jumps)
        recent = takewhile(lambda jump: jump / middle > 0.5, reversed(self._jumps))
        self._since = self._count - sum(1 for _ in recent)
        self._jumps.clear()

    def blind(self, rows: int) -> bool:
        """Whether rounds are far off their predictions and no recent one was plain.

        Then nothing tells whether all steps are slower or only the wide ones,
        which is what the choice of a width hangs on.
        """
        return (
            abs(self._off) > FAR
            and self._count - self._plain.get(rows, -PLAIN_WITHIN) >= PLAIN_WITHIN
        )

    @property
    def _live(self) -> int:
        return min(self._count, WINDOW)

    def _aged(self) -> Floats:
        """Weights of the rounds kept, by age; 0 for those of another state of the device."""
        live, here = self._live, self._count - self._since
        last = (self._count - 1) % WINDOW
        if here >= live:
            return AGES[last, :live]
        age = (last - np.arange(live)) % WINDOW
        return np.asarray(np.where(age < here, AGES[last, :live], 0.0))

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
        order = self._log[: self._live].argsort()
        near = self._ages[order] * NEAR_ROWS[_row(rows), self._rows[order]]
        widths = min(count, WIDEST)
        weights = NEAR[self._shape[order], :, :widths] * near[:, None, None]
        logs = _weighted_median(self._log[order], weights.reshape(len(order), 2 * widths))
        logs = logs.reshape(2, widths)
        shapes = self._shapes.get(rows)
        if shapes is not None:
            logs += shapes.at(self._count, widths)
        factors = np.ones((2, count))
        np.exp(np.minimum(np.maximum(logs, -BOUND), BOUND), out=factors[:, :widths])
        return factors


def _row(rows: int) -> int:
    """Where ``rows`` are in NEAR_ROWS; so many rows are never served at once."""
    return min(rows, WIDEST) - 1


def _weighted_median(values: Floats, weights: Floats) -> Floats:
    """Sorted ``values (N,)`` under each column of ``weights (N, M)``: ``(M,)``."""
    mass = weights.cumsum(axis=0)
    return np.asarray(values[(mass >= 0.5 * mass[-1]).argmax(axis=0)])
