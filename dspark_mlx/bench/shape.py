"""What the price of a round depends on, and what that price usually is. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

AS_USUAL = 1.0  # weight of the guess that a run met the machine in its usual state: one round's
A_SINGLE_ROUND = 0.01  # weight of a shape that a run met once: such a round may be any odd one


class Shape(NamedTuple):
    """What the price of a round depends on.

    ``drafting`` of the ``rows`` drafted, at most ``drafted`` tokens, and the widest
    verified ``scheduled``; ``looked`` at the confidences before. ``after_draft``: a
    plain round that could not begin before the last one was read.
    """

    rows: int
    drafting: int
    drafted: int
    scheduled: int
    looked: bool
    after_draft: bool


def shared(rounds: Sequence[tuple[Shape, float]]) -> Iterator[tuple[Shape, float]]:
    """Plain rounds in a row overlap, so each is given an equal part of what they all took."""
    for (plain, _), group in itertools.groupby(rounds, lambda r: (r[0].drafted == 0, r[0].rows)):
        found = list(group)
        mean = sum(seconds for _, seconds in found) / len(found)
        yield from ((shape, mean if plain else seconds) for shape, seconds in found)


def usual_prices(runs: Sequence[Sequence[tuple[Shape, float]]]) -> dict[Shape, float]:
    """Seconds of each shape when the machine is as usual, from the rounds of several runs.

    Log seconds are what is usual for the shape plus the state of the machine during
    the run; both are fitted by least squares to the median of each shape in each
    run, which weighs as much as it has rounds; that a run met the usual state is
    the guess to start from. A plain median would charge a slow minute to whichever
    shape happened to be in use.
    """
    cells: list[tuple[int, Shape, float, int]] = []
    for number, run in enumerate(runs):
        rounds: dict[Shape, list[float]] = {}
        for shape, seconds in run:
            rounds.setdefault(shape, []).append(seconds)
        cells += [
            (number, shape, math.log(max(median(found), 1e-9)), len(found))
            for shape, found in rounds.items()
        ]
    place = {shape: len(runs) + n for n, shape in enumerate({cell[1]: None for cell in cells})}
    equations = np.zeros((len(cells) + len(runs), len(runs) + len(place)))
    wanted = np.zeros(len(equations))
    for n, (number, shape, value, count) in enumerate(cells):
        weight = math.sqrt(max(count - 1, A_SINGLE_ROUND))
        equations[n, [number, place[shape]]] = weight
        wanted[n] = weight * value
    equations[len(cells) :, : len(runs)] = AS_USUAL * np.eye(len(runs))
    found = np.linalg.lstsq(equations, wanted, rcond=None)[0]
    usual = float(np.median(found[: len(runs)])) if len(runs) else 0.0
    return {shape: math.exp(float(found[n]) + usual) for shape, n in place.items()}
