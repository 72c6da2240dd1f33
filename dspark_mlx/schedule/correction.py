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

import functools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from statistics import median
from typing import NamedTuple

import numpy as np

from .calibration import Floats

AGE = 5.0  # rounds after which a measurement counts 1/e
WINDOW = 16  # rounds kept; older ones would count next to nothing
AGES = [math.exp(-(1 + age) / AGE) for age in range(WINDOW)]
PLAIN_WITHIN = 24  # rounds in which a far correction wants a plain one
WIDEST = 64  # wider rows are neither corrected nor learned from
OTHER_KIND = 0.5  # weight of a round that looked for one that did not, and back
_W = np.arange(WIDEST)
NEAR = np.exp(-np.abs(_W[:, None] - _W) / 2.0)  # weight of a width (first) for another
NEAR = np.stack([np.stack([NEAR, OTHER_KIND * NEAR], 1), np.stack([OTHER_KIND * NEAR, NEAR], 1)])
NEAR = NEAR.reshape(2 * WIDEST, 2, WIDEST)  # by place: whether each looked, too
NEAR_ROWS = np.exp(-np.abs(_W[:, None] - _W) / 1.0)
FAR = math.log(1.25)  # a correction that calls for a look at the plain step
MOVED = math.log(1.12)  # a change that is no noise: the device is in another state
JUMPS = 4  # rounds, each against earlier ones of its own shape, that show it; one may be missing
BOUND = math.log(8.0)
ODD = 0.5  # most that one round counts in what is particular to a shape
FADE = 40.0  # rounds after which that counts 1/e
SLOWEST = 0.03  # least share of a new residual in what is known of its shape
USUAL = math.log(1.2)  # most that a profile is taken to be wrong about one shape for good
USUAL_SHARE = 0.05  # of a new residual in that, at least


@dataclass(slots=True)
class _Shape:
    """What is steadily particular to one shape, in log seconds.

    ``log`` in the present state of the device, from ``seen`` rounds, the last of them
    number ``when``; ``usual`` in any state, from ``often`` rounds.
    """

    log: float = 0.0
    seen: int = 0
    when: int = 0
    usual: float = 0.0
    often: int = 0

    def particular(self, now: int) -> float:
        """What is known beside what is usual, fading since the shape was last seen."""
        return self.log * math.exp((self.when - now) / FADE)

    def learn(self, now: int, known: float, residual: float, usual: bool) -> None:
        """A round of which ``known`` was known left ``residual`` unexplained.

        ``usual``: whether the device is about as fast as when it was profiled.
        """
        known += max(SLOWEST, 1.0 / (self.seen + 4.0)) * residual
        self.log = min(max(known, -BOUND), BOUND)
        self.seen, self.when = self.seen + 1, now
        if usual:
            # The first rounds of a load look like a wrong profile: no round says much of it.
            residual = min(max(residual, -MOVED), MOVED)
            wrong = self.usual + max(USUAL_SHARE, 1.0 / (self.often + 4.0)) * residual
            self.usual = min(max(wrong, -USUAL), USUAL)
            self.often += 1

    def forget(self) -> None:
        """Another state of the device: what the profile is usually wrong by still holds."""
        self.log, self.seen = 0.0, 0


class _Round(NamedTuple):
    """``log``: measured over predicted beside ``known``, what was particular to its shape.

    ``row`` and ``place`` are where its rows and its shape are in NEAR_ROWS and NEAR.
    """

    log: float
    known: float
    row: int
    place: int


class OnlineCorrection:
    """``update`` after each round, ``factors`` before the next. Bounded to [1/8, 8].

    ``moves`` counts how often rounds left what others of their own shape had
    taken. Shapes are never compared with each other for it: the widths in use
    change with the text, and a table that is wrong about some is no load.
    """

    def __init__(self) -> None:
        self.moves = 0
        self._rounds: deque[_Round] = deque(maxlen=WINDOW)  # of the device's present state
        self._ordered: list[tuple[_Round, float]] = []  # by log, with their weights
        self._count = 0
        self._shapes: dict[int, dict[int, _Shape]] = {}  # by rows and place
        self._plain: dict[int, int] = {}
        self._off = 0.0
        self._jumps: deque[float] = deque(maxlen=JUMPS)
        self._cache: dict[int, Floats] = {}
        self._longest = 0

    def update(self, rows: int, width: int, look: bool, predicted: float, measured: float) -> None:
        """One round of ``rows`` rows, its widest row ``width`` tokens."""
        if not (predicted > 0.0 and measured > 0.0 and width <= WIDEST):
            return
        row, place = _row(rows), look * WIDEST + width - 1
        shape = self._shapes.setdefault(rows, {}).setdefault(place, _Shape())
        ratio = min(max(math.log(measured / predicted), -BOUND), BOUND) - shape.usual
        known = shape.particular(self._count)
        moved = self._moved(row, place, ratio)
        self._rounds.append(_Round(ratio - known, known, row, place))
        self._count += 1
        self._cache.clear()
        if moved:
            self._forget()
            known = 0.0
        level = self._level()
        self._off = level + known + shape.usual
        if width == 1:
            self._plain[rows] = self._count
        residual = min(max(ratio - level - known, -ODD), ODD)
        shape.learn(self._count, known, residual, usual=abs(level) < FAR)

    def _moved(self, row: int, place: int, ratio: float) -> bool:
        """Whether the last rounds all left what their shapes took before."""
        same = [r.log + r.known for r in self._rounds if r.place == place and r.row == row]
        if len(same) >= 2:
            self._jumps.append(ratio - median(same))
        return len(self._jumps) >= JUMPS - 1 and abs(median(self._jumps)) > MOVED

    def _forget(self) -> None:
        """Another state of the device: only the rounds that showed it still count."""
        self.moves += 1
        for shapes in self._shapes.values():
            for shape in shapes.values():
                shape.forget()
        middle = median(self._jumps)
        shown = sum(1 for _ in takewhile(lambda jump: jump / middle > 0.5, reversed(self._jumps)))
        recent = list(self._rounds)[-max(shown, 1) :]
        self._rounds.clear()
        self._rounds += [r._replace(log=r.log + r.known, known=0.0) for r in recent]
        self._jumps.clear()

    def _level(self) -> float:
        """The level of the last rounds, whatever their shapes: a median weighted by age."""
        self._ordered = sorted(zip(self._rounds, self._weights(), strict=True))
        left = 0.5 * sum(weight for _, weight in self._ordered)
        for done, weight in self._ordered:
            left -= weight
            if left <= 0.0:
                return done.log
        return self._ordered[-1][0].log

    def _weights(self) -> Iterator[float]:
        """Of the rounds kept, oldest first."""
        return reversed(AGES[: len(self._rounds)])

    def blind(self, rows: int) -> bool:
        """Whether rounds are far off their predictions and no recent one was plain.

        Then nothing tells whether all steps are slower or only the wide ones,
        which is what the choice of a width hangs on.
        """
        return (
            abs(self._off) > FAR
            and self._count - self._plain.get(rows, -PLAIN_WITHIN) >= PLAIN_WITHIN
        )

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
        widths = min(count, WIDEST)
        values, _, at, places = zip(*[done for done, _ in self._ordered], strict=True)
        near = NEAR_ROWS[_row(rows)].take(at)
        near *= [weight for _, weight in self._ordered]
        weights = _near(widths).take(places, axis=0)
        weights *= near[:, None]
        logs = _weighted_median(np.array(values), weights)
        beside = [0.0] * (2 * WIDEST)  # what is particular to each shape
        for place, shape in self._shapes.get(rows, {}).items():
            beside[place] = shape.particular(self._count) + shape.usual
        logs += beside[:widths] + beside[WIDEST : WIDEST + widths]
        factors = np.ones((2, count))
        logs = np.minimum(np.maximum(logs, -BOUND), BOUND).reshape(2, widths)
        np.exp(logs, out=factors[:, :widths])
        return factors


@functools.cache
def _near(widths: int) -> Floats:
    """NEAR for the first ``widths``, without a look and then with: ``(places, 2 * widths)``."""
    return np.asarray(NEAR[:, :, :widths].reshape(2 * WIDEST, 2 * widths))


def _row(rows: int) -> int:
    """Where ``rows`` are in NEAR_ROWS; so many rows are never served at once."""
    return min(rows, WIDEST) - 1


def _weighted_median(values: Floats, weights: Floats) -> Floats:
    """Sorted ``values (N,)`` under each column of ``weights (N, M)``: ``(M,)``."""
    mass = weights.cumsum(axis=0)
    return np.asarray(values[(mass >= 0.5 * mass[-1]).argmax(axis=0)])
