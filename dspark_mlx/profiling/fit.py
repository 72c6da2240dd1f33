"""From noisy samples to prices: what is typical, and what cannot be true evened out. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from .grid import Shape

EVEN_ROUNDS = 12
SURE = 0.75  # share of the passes in which a longer step must have been the faster one
LEAST = 3  # passes that can show it

Samples = dict[int, dict[int, list[float]]]  # [rows][size]: seconds, one a pass, in their order


def typical(samples: Sequence[float]) -> float:
    """Median of the faster half: what else runs on the machine only ever adds time."""
    return median(sorted(samples)[: (len(samples) + 1) // 2])


def evened(samples: Mapping[Shape, Sequence[float]]) -> dict[Shape, list[float]]:
    """``samples`` of one site as if the machine had been as fast in every pass.

    Clock speeds wander by more, from pass to pass, than the shapes compared within
    one differ. A pass's speed is the median of its samples against the medians of
    their shapes (median polish); what is typical of the passes becomes that of all.
    Shapes that were added later have fewer samples; the last passes had them all.
    """
    logs = {shape: [math.log(x) for x in reversed(xs)] for shape, xs in samples.items()}
    passes = range(max(map(len, logs.values()), default=0))
    level = [0.0] * len(passes)
    for _ in range(EVEN_ROUNDS):
        usual = {
            shape: median(x - level[i] for i, x in enumerate(xs)) for shape, xs in logs.items()
        }
        level = [median(xs[i] - usual[s] for s, xs in logs.items() if i < len(xs)) for i in passes]
    if not level:
        return {}
    speed = math.log(typical([math.exp(x) for x in level]))
    return {
        shape: [math.exp(x - level[i] + speed) for i, x in enumerate(xs)][::-1]
        for shape, xs in logs.items()
    }


def fit(samples: Samples) -> dict[int, dict[int, float]]:
    """Prices ``[rows][size]`` near the median, without what noise alone would explain.

    More tokens never cost less, except where most passes agree that they do:
    matrix kernels may be faster at a multiple of their tile. What is left between
    such steps is evened out (pool adjacent violators); stairs stay stairs. Numbers
    of rows are left as they are: what is chosen between are widths of one.
    """
    fitted = {r: {n: median(p[n]) for n in sorted(p)} for r, p in sorted(samples.items())}
    for r, points in fitted.items():
        even = _between(list(points.values()), _drops(samples[r]))
        points.update(zip(points, even, strict=True))
    return fitted


def _drops(points: dict[int, list[float]]) -> list[int]:
    """Places in the order of sizes before which a drop of the price is no noise."""
    sizes, found = sorted(points), []
    for i in range(1, len(sizes)):
        before, after = points[sizes[i - 1]], points[sizes[i]]
        # Sizes that were added later have fewer samples; the last passes had them all.
        pairs = list(zip(reversed(before), reversed(after), strict=False))
        faster = sum(b > a for b, a in pairs)
        if len(pairs) >= LEAST and faster >= SURE * len(pairs) and median(after) < median(before):
            found.append(i)
    return found


def _between(values: list[float], drops: Sequence[int]) -> list[float]:
    """Isotonic between one drop and the next."""
    ends = [0, *drops, len(values)]
    return [v for a, b in pairwise(ends) for v in isotonic(values[a:b])]


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to ``values`` (least squares)."""
    pools: list[tuple[float, int]] = []  # mean and length
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [((a * n + b * m) / (n + m), n + m)]
    return [mean for mean, length in pools for _ in range(length)]
