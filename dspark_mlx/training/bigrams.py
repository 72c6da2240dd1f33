"""First weights of the sequential head: a low-rank table of what follows what.

The head adds a bias of the previous token to the backbone's logits. Counted in
the training answers, the log of the smoothed bigram distribution is what a
drafter that knows nothing else should say. Training begins at its rank-R
approximation, each entry weighted by how often it matters, instead of having to
find the rows of thousands of tokens a few steps at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .data import Sample

_SMOOTHING = 4.0  # imaginary neighbours of each token, drawn from all tokens
_ROWS = 8192  # previous tokens with a row of their own; rarer ones begin at zero


def bigram_factors(
    samples: Sequence[Sample], vocab_size: int, hot_ids: np.ndarray | None, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """``W1 (V, R)`` and ``W2 (Vd, R)`` with ``W1 W2^T`` close to ``log p(next | previous)``.

    Tokens that were never, or rarely, seen as the previous one share a row.
    """
    columns = np.arange(vocab_size) if hot_ids is None else hot_ids
    to_column = np.full(vocab_size, -1)
    to_column[columns] = np.arange(len(columns))
    before = np.concatenate([s.tokens[s.start - 1 : -1] for s in samples])
    after = to_column[np.concatenate([s.tokens[s.start :] for s in samples])]
    before, after = before[after >= 0], after[after >= 0]
    counts = np.bincount(before, minlength=vocab_size)
    rows = np.sort(np.argsort(-counts, kind="stable")[:_ROWS])
    rows = rows[counts[rows] > 0]
    to_row = np.full(vocab_size, -1)
    to_row[rows] = np.arange(len(rows))
    kept = to_row[before] >= 0
    table = np.zeros((len(rows), len(columns)), dtype=np.float32)
    np.add.at(table, (to_row[before[kept]], after[kept]), 1.0)
    total = table.sum(1, keepdims=True)
    prior = np.bincount(after, minlength=len(columns)).astype(np.float32) + 0.5
    prior /= prior.sum()
    table += _SMOOTHING * prior
    table /= total + _SMOOTHING
    np.log(table, out=table)
    # A constant added to a row changes no probability: centred rows are smaller.
    table -= (table * prior).sum(1, keepdims=True)
    weigh_rows = np.sqrt(total[:, 0] / total.sum()).astype(np.float32)
    weigh_columns = np.sqrt(prior)
    table *= weigh_rows[:, None] * weigh_columns
    left, sizes, right = _truncated_svd(table, min(rank, *table.shape))
    root = np.sqrt(sizes)
    known = left * root / weigh_rows[:, None]
    average = (known * (weigh_rows**2)[:, None]).sum(0)
    w1 = np.zeros((vocab_size, rank), dtype=np.float32)
    w2 = np.zeros((len(columns), rank), dtype=np.float32)
    w1[:, : len(sizes)] = average
    w1[rows, : len(sizes)] = known
    w2[:, : len(sizes)] = right * root / weigh_columns[:, None]
    # Dividing by small weights can blow a rare row up; none may outweigh the common ones.
    return _bounded(w1), _bounded(w2)


def _bounded(rows: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1)
    limit = np.quantile(norms[norms > 0], 0.98) if np.any(norms > 0) else 1.0
    return rows * np.minimum(1.0, limit / np.maximum(norms, 1e-9))[:, None].astype(np.float32)


def _truncated_svd(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Randomised subspace iteration: ``(m, R)``, ``(R,)``, ``(n, R)``."""
    rng = np.random.default_rng(0)
    wide = min(rank + 8, *matrix.shape)
    basis = rng.standard_normal((matrix.shape[1], wide)).astype(np.float32)
    for _ in range(4):
        basis = np.linalg.qr(matrix @ basis)[0]
        basis = np.linalg.qr(matrix.T @ basis)[0]
    left, sizes, inner = np.linalg.svd(matrix @ basis, full_matrices=False)
    right = basis @ inner.T
    return left[:, :rank], sizes[:rank], right[:, :rank]
