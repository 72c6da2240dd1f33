"""The best number of tokens to verify, exactly, over all rows at once.

Rows are padded to the widest, so a step's price depends on one number, its
width, and verifying a shorter row up to that width costs nothing more. What is
left to choose is the width W. ``per_round`` is the paper's objective, tokens
over seconds of this one round. Over many rounds tokens per second is highest
when each maximises tokens - rate * seconds, where ``rate`` is the throughput so
attained (renewal reward; Dinkelbach's method finds it): ``per_rate`` and
``attainable``.

``gains[..., W]`` is the sum over rows of a_1 + ... + a_min(W, l_r); ``seconds[W]``
the whole round. The optimum reads the confidence of every drafted token, so it
is only for rows whose text no decision can change, or for rounds that are over;
``levels`` and ``level_stop`` are the causal counterpart: level w is entered on
what was known before any row's x_w was drawn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .calibration import Floats

Counts = NDArray[np.int64]


def per_round(rows: int, gains: Floats, seconds: Floats) -> int:
    """W that maximises (rows + gains) / seconds; the smallest of equals."""
    return int(np.argmax((rows + gains) / seconds))


def per_rate(gains: Floats, seconds: Floats, rate: float) -> int:
    """W that maximises gains - rate * seconds; the smallest of equals."""
    return int(np.argmax(gains - rate * seconds))


def levels(mean_gains: Floats, seconds: Floats, rate: float) -> Floats:
    """Least total survival ``(K + 1,)`` at which entering each level pays; entry 0 unused.

    Entering level w opens the way to w + j. With the later levels worth what
    they are on average, relative to this one, it pays when some j makes
    a_w * (1 + ...) exceed rate * (seconds[w + j] - seconds[w - 1]); so a cliff
    is crossed when what lies beyond it is worth it.
    """
    k = len(seconds)
    won = mean_gains[None, 1:] - mean_gains[:-1, None]  # from w - 1 (row) up to w + j (column)
    spent = rate * (seconds[None, 1:] - seconds[:-1, None])
    own = np.maximum(np.diff(mean_gains), 1e-12)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        need = np.where(np.tri(k - 1, dtype=bool).T, spent * own / np.maximum(won, 1e-12), np.inf)
    out = np.zeros(k)
    out[1:] = need.min(axis=1, initial=np.inf)  # no level at all is no error
    return out


def level_stop(marginal: Floats, least: Floats) -> Floats:
    """Levels entered before the first that does not pay; ``marginal (..., K)`` -> ``(...)``."""
    enter = marginal > least[1 : marginal.shape[-1] + 1]
    return np.asarray(np.logical_and.accumulate(enter, axis=-1).sum(axis=-1))


def fixed_seconds(there: Counts, draft: Floats, step: Floats, factor: Floats) -> Floats:
    """Mean seconds of drafting and verifying W every round, for each W: ``(K + 1,)``.

    ``there (N,)`` is how many tokens the proposers had in past rounds: one with
    fewer is verified, and paid, as such.
    """
    k = len(step)
    if there.min() >= k - 1:
        return np.asarray((draft + step) * factor)
    verified = np.minimum(np.arange(k)[None, :], there[:, None])
    return np.asarray(((draft + step[verified]) * factor[verified]).mean(axis=0))


def attainable(rows: int, gains: Floats, seconds: Floats, rate: float, causal: bool) -> float:
    """Tokens/s of choosing W anew each round with its confidences in hand.

    ``gains (N, K + 1)`` are past rounds; ``rate`` a throughput known to be
    attainable; ``causal`` when the choice must not anticipate. One step of
    Dinkelbach's method, which from a good ``rate`` is all but exact.
    """
    n = len(gains)
    if causal:
        least = levels(gains.sum(axis=0) / n, seconds, rate)
        chosen = level_stop(gains[:, 1:] - gains[:, :-1], least)
    else:
        chosen = (gains - rate * seconds).argmax(axis=1)
    return float((rows * n + gains[np.arange(n), chosen].sum()) / seconds[chosen].sum())
