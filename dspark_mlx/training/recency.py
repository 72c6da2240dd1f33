"""First weights that look at the last few positions of the context.

What a drafter needs first is what stands just before its anchor. Attention that
begins at random has to discover position by position where to look, which takes
longer than a laptop has; here every head begins by looking one, two or three
positions back, through the rotary embedding alone. ``fc`` begins as the principal
components of the standardised taps, values as the strongest of these, and the
MLP at random. A bias in the projections (Qwen3's ``attention_bias``) makes the
queries constant.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..draft.dspark.network import Drafter

_PAIRS = 12  # rotary frequencies in the pattern: the fast ones, which tell neighbours apart
_SHARPNESS = 2.0  # weight of query and key norms: logits of 32 between pattern and pattern
_CONTENT = 0.3  # size of the random part of queries and keys beside the pattern


def look_back(drafter: Drafter, taps: np.ndarray, seed: int = 0) -> None:
    """Set the weights of ``fc`` and all layers; ``taps (N, T*H)`` is a sample of features."""
    rng = np.random.default_rng(seed)
    config = drafter.config
    hidden, dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    drafter.fc.weight = mx.array(_components(taps, hidden))
    context = np.array(drafter.project(mx.array(taps)).astype(mx.float32))
    mean = context.mean(0)
    spread = context - mean
    _, order = np.linalg.eigh(spread.T @ spread)
    strongest = order[:, ::-1][:, : kv_heads * dim].T

    theta = float(config.rope_parameters["rope_theta"])
    pairs = min(_PAIRS, dim // 2)
    speeds = theta ** (-np.arange(pairs) / (dim // 2))
    size = np.sqrt(dim / pairs)
    pattern = _turned(np.zeros(pairs), dim) * size

    def random(rows: int, columns: int, scale: float = 1.0) -> mx.array:
        values = rng.standard_normal((rows, columns)) * scale / np.sqrt(columns)
        return mx.array(values.astype(np.float32))

    for layer in drafter.layers:
        attention, mlp = layer.self_attn, layer.mlp
        # Only the context has this mean, so that only its keys show the pattern.
        shown = np.tile(pattern, kv_heads)
        if kv_heads > 1:
            shown[-dim:] = 0.0
        keys = np.outer(shown, mean / (mean @ mean))
        attention.k_proj.weight = mx.array(keys.astype(np.float32)) + random(
            kv_heads * dim, hidden, _CONTENT
        )
        attention.q_proj.weight = random(heads * dim, hidden, _CONTENT)
        group = heads // kv_heads
        back = [_turned(-(1 + i % group) * speeds, dim) * size for i in range(heads)]
        attention.q_proj.bias = mx.array(np.concatenate(back).astype(np.float32))
        bias = np.zeros((kv_heads, dim))
        if kv_heads > 1:  # the last keys show it everywhere: these heads see the block's own slots
            bias[-1] = pattern
        attention.k_proj.bias = mx.array(bias.reshape(-1).astype(np.float32))
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight = mx.full((dim,), _SHARPNESS)
        # Interleaved, so that every head has strong components and weak ones.
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
    mx.eval(drafter.parameters())


def _turned(angles: np.ndarray, dim: int) -> np.ndarray:
    """Unit pairs at ``angles`` in the first frequencies of a head (halves layout), else zero."""
    out = np.zeros(dim)
    out[: len(angles)] = np.cos(angles)
    out[dim // 2 : dim // 2 + len(angles)] = np.sin(angles)
    return out


def _components(taps: np.ndarray, hidden: int) -> np.ndarray:
    """``fc (H, T*H)``: principal components of the taps with every channel brought to one size.

    A few channels of deep layers are hundreds of times larger than the rest; left
    alone they would be all that the shared norm lets through.
    """
    scale = 1.0 / np.maximum(np.sqrt((taps.astype(np.float64) ** 2).mean(0)), 1e-6)
    even = taps * scale
    sizes, vectors = np.linalg.eigh(even.T @ even / len(even))
    top = vectors[:, ::-1][:, :hidden]
    sizes = np.maximum(sizes[::-1][:hidden], 1e-9)
    return ((top * sizes**-0.25).T * scale).astype(np.float32)
