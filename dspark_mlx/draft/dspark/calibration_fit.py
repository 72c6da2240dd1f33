"""Sequential temperature scaling (STS, paper §3.2.1) and how well a confidence is calibrated.

Owns the fit on held-out rounds and the measures of calibration. A temperature
alone cannot move a confidence of one half, so a position may have an offset too
(Platt, 1999). Order of confidences at a position never changes: a temperature
is positive. What is learned while the engine runs belongs to ``schedule.acceptance``.

Shapes: ``confidence (N, K)`` is c_k of N drafted blocks; ``accepted (N,)`` is
how many leading tokens of each the target accepted; ``reached (N,)`` is how
many were verified (K when absent).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...errors import UsageError

Floats = NDArray[np.float64]

MIN_ROUNDS = 200
BINS = 15
TINY = 1e-6
GRID: Floats = np.exp(np.linspace(np.log(0.2), np.log(5.0), 97))
SLACK = 0.12  # of 1/sqrt(rounds): differences of errors below it are chance
LEAST_SLOPE = 0.05  # of the confidence in a blend: its order still counts
MIN_TESTED = 100  # tokens of a position put to the test that make a blend of its own
OFFSETS: Floats = np.linspace(-2.0, 2.0, 41)


def logit(p: ArrayLike) -> Floats:
    p = np.clip(np.asarray(p, np.float64), TINY, 1.0 - TINY)
    return np.asarray(np.log(p / (1.0 - p)))


def sigmoid(x: ArrayLike) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-np.asarray(x, np.float64))))


def apply(
    confidence: ArrayLike,
    temperatures: ArrayLike,
    offsets: ArrayLike = 0.0,
    more: ArrayLike = 0.0,
) -> Floats:
    """σ(logit(c_k) / T_k + b_k + more_k), elementwise over ``(..., K)``.

    Temperatures and offsets of positions beyond K are not used.
    """
    c = np.asarray(confidence, np.float64)
    t = np.asarray(temperatures, np.float64)[: c.shape[-1]]
    if t.shape[-1] < c.shape[-1]:
        raise UsageError(f"{c.shape[-1]} positions, but temperatures for {t.shape[-1]} only")
    b = np.asarray(offsets, np.float64)
    return sigmoid(logit(c) / t + (b[: c.shape[-1]] if b.ndim else b) + np.asarray(more))


@dataclass(frozen=True, slots=True)
class Bin:
    """One bar of a reliability diagram: mean prediction against what happened."""

    predicted: float
    observed: float
    count: int


def reliability(predicted: ArrayLike, happened: ArrayLike, bins: int = BINS) -> tuple[Bin, ...]:
    """Non-empty bins of equal width over [0, 1], in order."""
    p = np.asarray(predicted, np.float64).ravel()
    y = np.asarray(happened, np.float64).ravel()
    index = np.minimum((p * bins).astype(np.int64), bins - 1)
    count = np.bincount(index, minlength=bins)
    ps = np.bincount(index, weights=p, minlength=bins)
    ys = np.bincount(index, weights=y, minlength=bins)
    return tuple(
        Bin(float(ps[i] / n), float(ys[i] / n), int(n)) for i, n in enumerate(count) if n > 0
    )


def ece(predicted: ArrayLike, happened: ArrayLike, bins: int = BINS) -> float:
    """Expected calibration error (Naeini et al., 2015): mean |prediction - frequency|."""
    p = np.asarray(predicted, np.float64).ravel()
    if p.size == 0:
        raise UsageError("calibration error of no predictions")
    y = np.asarray(happened, np.float64).ravel()
    index = np.minimum((p * bins).astype(np.int64), bins - 1)
    return float(np.abs(np.bincount(index, weights=p - y, minlength=bins)).sum() / p.size)


def log_loss(predicted: ArrayLike, happened: ArrayLike) -> float:
    """Mean negative log-likelihood, in nats."""
    p = np.clip(np.asarray(predicted, np.float64), TINY, 1.0 - TINY)
    y = np.asarray(happened, np.float64)
    return float(-(y * np.log(p) + (1.0 - y) * np.log(1.0 - p)).mean())


def auc(predicted: ArrayLike, happened: ArrayLike) -> float:
    """Chance that an accepted token was given more confidence than a rejected one.

    Ties count half; NaN when only one of the two kinds occurs.
    """
    p = np.asarray(predicted, np.float64).ravel()
    y = np.asarray(happened).ravel().astype(bool)
    ones, zeros = int(y.sum()), int((~y).sum())
    if not ones or not zeros:
        return float("nan")
    _, inverse, counts = np.unique(p, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]
    return float((ranks[y].sum() - ones * (ones + 1) / 2.0) / (ones * zeros))


@dataclass(frozen=True, slots=True)
class Calibration:
    """What ``fit`` found: temperature and offset per position, and the error before and after."""

    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    auc: tuple[float, ...]
    rounds: int

    def to_json(self) -> dict[str, object]:
        return {
            "temperatures": list(self.temperatures),
            "offsets": list(self.offsets),
            "ece_before": list(self.ece_before),
            "ece_after": list(self.ece_after),
            "auc": [None if a != a else a for a in self.auc],
            "rounds": self.rounds,
        }


def fit(
    confidence: ArrayLike,
    accepted: ArrayLike,
    reached: ArrayLike | None = None,
    *,
    offsets: bool = False,
    min_rounds: int = MIN_ROUNDS,
) -> Calibration:
    """Temperatures T_1..T_K, left to right, each minimising the ECE of a_k = ∏_{i≤k} c_i.

    Positions already calibrated stay fixed while the next is searched on a grid
    from 0.2 to 5, with ``offsets`` jointly with one from -2 to 2. Raises UsageError
    for fewer than ``min_rounds`` blocks that reach a position, or for shapes that do
    not fit.
    """
    c = np.asarray(confidence, np.float64)
    done = np.asarray(accepted, np.int64)
    if c.ndim != 2 or done.shape != c.shape[:1]:
        raise UsageError("calibration needs confidences (N, K) and accepted counts (N,)")
    full = np.full(c.shape[0], c.shape[1]) if reached is None else np.asarray(reached, np.int64)
    if not np.all(np.isfinite(c)) or c.min(initial=0.0) < 0.0 or c.max(initial=1.0) > 1.0:
        raise UsageError("confidences must lie between 0 and 1")
    if np.any(done > full) or np.any(full > c.shape[1]):
        raise UsageError("a block cannot accept more tokens than were verified")
    shifts = OFFSETS if offsets else np.zeros(1)
    grid = [(float(t), float(b)) for t in (GRID[::3] if offsets else GRID) for b in shifts]
    survival = np.ones(c.shape[0])
    raw = np.cumprod(c, axis=1)
    chosen, before, after, rank = [], [], [], []
    for k in range(c.shape[1]):
        # Only blocks sent that far: to add those known to have failed sooner, but not those
        # that may have gone on, would count rejections alone.
        known = full > k
        if int(known.sum()) < min_rounds:
            raise UsageError(
                f"only {int(known.sum())} rounds reach draft position {k + 1}",
                f"calibrate on at least {min_rounds}",
            )
        y = (done > k)[known]
        x, so_far = logit(c[:, k])[known], survival[known]
        errors = [ece(so_far * sigmoid(x / t + b), y) for t, b in grid]
        # Among those as good as the best, but for chance, that which changes least.
        enough = min(errors) + SLACK / np.sqrt(len(y))
        best = min(
            (i for i, error in enumerate(errors) if error <= enough),
            key=lambda i: abs(np.log(grid[i][0])) + abs(grid[i][1]),
        )
        temperature, offset = grid[best]
        survival = survival * sigmoid(logit(c[:, k]) / temperature + offset)
        chosen.append(grid[best])
        before.append(ece(raw[known, k], y))
        after.append(errors[best])
        rank.append(auc(survival[known], y))
    return Calibration(
        tuple(t for t, _ in chosen),
        tuple(b for _, b in chosen),
        tuple(before),
        tuple(after),
        tuple(rank),
        int(c.shape[0]),
    )


@dataclass(frozen=True, slots=True)
class Blend:
    """σ(slope_k · logit(c_k) + weight_k · u_k + offset_k), a number per position."""

    slopes: Floats
    weights: Floats
    offsets: Floats

    def apply(self, confidence: ArrayLike, peaks: ArrayLike) -> Floats:
        """Confidences ``(N, K)`` and logits u ``(N, K)`` as one confidence."""
        x = self.slopes * logit(confidence) + self.weights * np.asarray(peaks) + self.offsets
        return sigmoid(x)


def blend(
    confidence: ArrayLike, peaks: ArrayLike, accepted: ArrayLike, reached: ArrayLike
) -> Blend:
    """How much to believe of c_k, and of u_k, the logit of slot k's largest probability.

    Logistic regression per position over the tokens that were put to the test, held
    near the confidence alone. Neither may count against acceptance.
    """
    x = np.stack([logit(confidence), np.asarray(peaks, np.float64)], axis=-1)
    done, full = np.asarray(accepted, np.int64), np.asarray(reached, np.int64)
    found: list[Floats] = []
    for k in range(x.shape[1]):
        tested = (full > k) & (done >= k)
        if found and tested.sum() < MIN_TESTED:
            found.append(found[-1])
        else:
            found.append(_logistic(x[tested, k], (done > k)[tested].astype(np.float64)))
    slopes, weights, offsets = np.array(found).T
    return Blend(slopes, weights, offsets)


def _logistic(x: Floats, y: Floats, ridge: float = 4.0) -> Floats:
    """Slope, weight and offset by Newton's method, held near (1, 0, 0)."""
    columns = np.column_stack([x, np.ones(len(x))])
    start = np.array([1.0, 0.0, 0.0])
    least = np.array([LEAST_SLOPE, 0.0, -np.inf])
    w, free = start.copy(), np.ones(3, bool)
    for _ in range(3):  # a bound that is hit stays, at most two of them
        for _ in range(30):
            p = sigmoid(columns @ w)
            slope = columns.T @ (y - p) - ridge * (w - start)
            curve = (columns * (p * (1.0 - p))[:, None]).T @ columns + ridge * np.eye(3)
            step = np.linalg.solve(curve[np.ix_(free, free)], slope[free])
            w[free] += np.clip(step, -1.0, 1.0)
        below = free & (w < least)
        if not below.any():
            break
        w[below], free = least[below], free & ~below
    return w
