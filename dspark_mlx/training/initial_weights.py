"""First weights of a drafter: what a short training run would otherwise spend its steps on.

Attention begins by looking one, two or three positions back, because the tokens just before the
anchor matter most and attention with random weights needs long to find them. The sequential head
begins as a low-rank table of what follows what. docs/training has the measurements.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..draft.dspark.network import Drafter
from .data import TrainingSample

# Of the target's final norm. Layers that have learned nothing yet hardly reach the logits, so the
# bigram table decides them.
INITIAL_NORM_SCALE = 0.1

_PAIRS = 12  # rotary frequencies in the pattern: the fast ones, which tell neighbours apart
_SHARPNESS = 2.0  # weight of query and key norms: logits of 32 between pattern and pattern
_CONTENT = 0.3  # size of the random part of queries and keys, relative to the pattern

_SMOOTHING = 4.0  # imaginary neighbours of each token, drawn from all tokens
_ROWS = 8192  # previous tokens with a row of their own; rarer ones share a row


def init_previous_token_attention(drafter: Drafter, taps: np.ndarray, seed: int = 0) -> None:
    """Let every head attend one, two or three positions back, by the rotary embedding alone.

    Sets ``fc`` and all layers. ``taps (N, T*H)`` is a sample of features: ``fc`` becomes the
    principal components of the standardised taps, values the strongest of these, the MLP random.
    The biases of the projections (Qwen3's ``attention_bias``) make the queries constant.
    """
    rng = np.random.default_rng(seed)
    config = drafter.config
    hidden, dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    drafter.fc.weight = mx.array(_principal_components(taps, hidden))
    context = np.array(drafter.project(mx.array(taps)).astype(mx.float32))
    mean = context.mean(0)
    spread = context - mean
    _, order = np.linalg.eigh(spread.T @ spread)
    strongest = order[:, ::-1][:, : kv_heads * dim].T

    theta = float(config.rope_parameters["rope_theta"])
    pairs = min(_PAIRS, dim // 2)
    speeds = theta ** (-np.arange(pairs) / (dim // 2))
    size = np.sqrt(dim / pairs)
    pattern = _rotated(np.zeros(pairs), dim) * size

    def random(rows: int, columns: int, scale: float = 1.0) -> mx.array:
        values = rng.standard_normal((rows, columns)) * scale / np.sqrt(columns)
        return mx.array(values.astype(np.float32))

    for layer in drafter.layers:
        attention, mlp = layer.self_attn, layer.mlp
        # Only the context has this mean, so only its keys hold the pattern.
        held = np.tile(pattern, kv_heads)
        if kv_heads > 1:
            held[-dim:] = 0.0
        keys = np.outer(held, mean / (mean @ mean))
        attention.k_proj.weight = mx.array(keys.astype(np.float32)) + random(
            kv_heads * dim, hidden, _CONTENT
        )
        attention.q_proj.weight = random(heads * dim, hidden, _CONTENT)
        group = heads // kv_heads
        back = [_rotated(-(1 + i % group) * speeds, dim) * size for i in range(heads)]
        attention.q_proj.bias = mx.array(np.concatenate(back).astype(np.float32))
        bias = np.zeros((kv_heads, dim))
        if kv_heads > 1:  # the last keys hold it everywhere: these heads see the block's slots
            bias[-1] = pattern
        attention.k_proj.bias = mx.array(bias.reshape(-1).astype(np.float32))
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight = mx.full((dim,), _SHARPNESS)
        # Interleaved, so that every head has strong and weak components.
        values = np.concatenate([strongest[h::kv_heads] for h in range(kv_heads)])
        values = np.resize(values, (kv_heads * dim, hidden))  # repeats where heads are wide
        values = values / np.maximum(np.std(spread @ values.T, axis=0), 1e-3)[:, None]
        attention.v_proj.weight = mx.array(values.astype(np.float32))
        attention.v_proj.bias = mx.array((-values @ mean).astype(np.float32))
        attention.o_proj.weight = random(hidden, heads * dim, 0.3)
        attention.o_proj.bias = mx.zeros((hidden,))
        mlp.gate_proj.weight = random(config.intermediate_size, hidden)
        mlp.up_proj.weight = random(config.intermediate_size, hidden)
        mlp.down_proj.weight = random(hidden, config.intermediate_size, 0.5)
        layer.input_layernorm.weight = mx.ones((hidden,))
        layer.post_attention_layernorm.weight = mx.ones((hidden,))


def _rotated(angles: np.ndarray, dim: int) -> np.ndarray:
    """Unit vectors at ``angles`` in the first rotary pairs of a head, zero in the others.

    Pair i is (i, i + dim / 2).
    """
    out = np.zeros(dim)
    out[: len(angles)] = np.cos(angles)
    out[dim // 2 : dim // 2 + len(angles)] = np.sin(angles)
    return out


def _principal_components(taps: np.ndarray, hidden: int) -> np.ndarray:
    """``fc (H, T*H)``: the principal components of the taps, all channels scaled to one size.

    A few channels of deep layers are hundreds of times larger than the rest; unscaled, they
    would be all that the norm behind ``fc`` lets through.
    """
    scale = 1.0 / np.maximum(np.sqrt((taps.astype(np.float64) ** 2).mean(0)), 1e-6)
    even = taps * scale
    sizes, vectors = np.linalg.eigh(even.T @ even / len(even))
    top = vectors[:, ::-1][:, :hidden]
    sizes = np.maximum(sizes[::-1][:hidden], 1e-9)
    components: np.ndarray = (top * sizes**-0.25).T * scale
    return components.astype(np.float32)


def bigram_factors(
    samples: Sequence[TrainingSample], vocab_size: int, vocab_ids: np.ndarray | None, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """``W1 (V, R)`` and ``W2 (Vd, R)`` with ``W1 W2^T`` close to ``log p(next | previous)``.

    The smoothed distribution is counted in the answers, and each entry of the table weighted by
    how often it matters. Rare previous tokens share a row.
    """
    columns = np.arange(vocab_size) if vocab_ids is None else vocab_ids
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
    """``rows`` with norms of at most the 98th percentile of those above 0."""
    norms = np.linalg.norm(rows, axis=1)
    limit = np.quantile(norms[norms > 0], 0.98) if np.any(norms > 0) else 1.0
    shrunk: np.ndarray = rows * np.minimum(1.0, limit / np.maximum(norms, 1e-9))[:, None].astype(
        np.float32
    )
    return shrunk


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
