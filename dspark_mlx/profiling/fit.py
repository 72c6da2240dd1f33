"""From noisy samples to prices: what is typical, and what cannot be true evened out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

FIT_ROUNDS = 8


def typical(samples: Sequence[float]) -> float:
    """Median of the faster half: what else runs on the machine only ever adds time."""
    return median(sorted(samples)[: (len(samples) + 1) // 2])


def monotone(table: dict[int, dict[int, float]]) -> dict[int, dict[int, float]]:
    """The nearest table in which more tokens, and more rows, never cost less.

    ``table[rows][size]``. Noise is evened out between the points it confuses
    (pool adjacent violators, along sizes and rows in turn until both hold);
    stairs stay stairs.
    """
    fitted = {r: dict(sorted(points.items())) for r, points in sorted(table.items())}
    sizes = sorted({size for points in fitted.values() for size in points})
    for _ in range(FIT_ROUNDS):
        for points in fitted.values():
            points.update(zip(points, isotonic(list(points.values())), strict=True))
        for size in sizes:
            column = [r for r in fitted if size in fitted[r]]
            for r, value in zip(column, isotonic([fitted[r][size] for r in column]), strict=True):
                fitted[r][size] = value
    return fitted


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to ``values`` (least squares)."""
    pools: list[tuple[float, int]] = []  # mean and length
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [((a * n + b * m) / (n + m), n + m)]
    return [mean for mean, length in pools for _ in range(length)]
