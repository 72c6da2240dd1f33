"""The parallel backbone: a block of slots through a few transformer layers.

Every layer attends, at absolute positions, to its context (keys and values of
the projected target features, kept in a ``RowsKV``) and to the whole block in
both directions; only in sliding layers (DFlash has them) is a slot's view limited
(``block_mask``). ``__call__`` is the
drafting form, one block a row on a context cache; ``over_blocks`` is the
training form, many blocks a row, each seeing the context before its own anchor.
Both share one set of projections. Heads, embeddings and loading live elsewhere.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from ...model.cache import RowsKV
from .config import DrafterConfig


def make_rope(config: DrafterConfig) -> Any:
    """mlx-lm's rope for this config, so that every type its targets know works here too."""
    rope = dict(config.rope_parameters)
    base = rope.pop("rope_theta")
    return initialize_rope(
        config.head_dim, base, False, rope or None, config.max_position_embeddings
    )


class DraftAttention(nn.Module):
    """Attention of a block to its context and itself; Qwen3's or Gemma 4's, by config.

    Gemma 4 scales scores by 1, normalises values without a weight, and with
    ``attention_k_eq_v`` has no ``v_proj``: values are the keys before norm and rope.
    """

    def __init__(self, config: DrafterConfig, window: int | None = None) -> None:
        super().__init__()
        self.window, self.causal = window, config.window_causal
        self.from_anchor = config.window_from_anchor
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            dim,
        )
        self.gemma = config.architecture == "gemma4"
        self.scale = 1.0 if self.gemma else dim**-0.5
        self.eps = config.rms_norm_eps
        self.q_proj = nn.Linear(hidden, self.heads * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * dim, bias=bias)
        if not config.attention_k_eq_v:
            self.v_proj = nn.Linear(hidden, self.kv_heads * dim, bias=bias)
        self.k_eq_v = config.attention_k_eq_v
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(dim, eps=self.eps)
        self.k_norm = nn.RMSNorm(dim, eps=self.eps)
        self.rope = make_rope(config)

    def keys_values(self, x: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array]:
        """``x (B, L, H)`` at positions from ``offset``: keys and values ``(B, kv_heads, L, D)``."""
        keys = self._split(self.k_proj(x), self.kv_heads)
        values = keys if self.k_eq_v else self._split(self.v_proj(x), self.kv_heads)
        if self.gemma:
            values = mx.fast.rms_norm(values, None, self.eps)
        return self.rope(self.k_norm(keys), offset=offset), values

    def queries(self, x: mx.array, offset: int | mx.array) -> mx.array:
        return self.rope(self.q_norm(self._split(self.q_proj(x), self.heads)), offset=offset)

    def __call__(self, x: mx.array, context: RowsKV) -> mx.array:
        """One block a row, ``x (B, G, H)``, on a RowsKV; leaves the context as it found it."""
        lengths, offset, width = list(context.lengths), context.offset, x.shape[1]
        queries = self.queries(x, offset)
        mask = self._block_mask(context, width)
        # The block borrows the free places behind the context: no copy of the context is made,
        # and rolling back only lowers the lengths.
        keys, values = context.update_and_fetch(*self.keys_values(x, offset))
        context.trim_to(lengths)
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, mask=mask
        )
        return self._merge(out)

    def _block_mask(self, context: RowsKV, width: int) -> mx.array | None:
        """What ``width`` slots behind ``context`` may attend to; None: everything.

        With a window W, the slot at position q sees keys at positions > q - W, or,
        counted from the anchor at position a, keys at positions >= a - W.
        """
        held = [n - s for n, s in zip(context.lengths, context.start, strict=True)]
        if self.window is None and min(held) == max(held):
            return None
        first = 0 if context.window is None else max(0, min(held) - context.window + 1)
        column = mx.arange(first, max(held) + width)
        anchor = mx.array(held, dtype=mx.int32)[:, None, None, None]
        slot = anchor + mx.arange(width)[:, None]
        mask = column < anchor + width
        if self.window is not None:
            if self.causal:
                mask = column <= slot
            reach = anchor - 1 if self.from_anchor else slot
            mask = mask & (column > reach - self.window)
        return mask

    def over_blocks(
        self, x: mx.array, context: tuple[mx.array, mx.array], anchors: mx.array, visible: mx.array
    ) -> mx.array:
        """Blocks ``x (B*A, G, H)`` at ``anchors (B*A,)``; ``visible (B, A, L)`` of the context.

        Scores to the context and to the own block are two products joined by one
        softmax, so that blocks never meet: memory grows with ``A * G * (L + G)``.
        """
        rows, blocks, length = visible.shape
        width, dim, repeats = x.shape[1], self.head_dim, self.heads // self.kv_heads

        def by_head(t: mx.array, per_head: int) -> mx.array:
            """``(B*A, heads, G, D)`` to ``(B, kv_heads, A, per_head, G, D)``: only these small
            tensors are ever transposed, never the scores."""
            t = t.reshape(rows, blocks, self.kv_heads, per_head, width, dim)
            return t.transpose(0, 2, 1, 3, 4, 5)

        queries = by_head(self.queries(x, anchors) * self.scale, repeats)
        keys, values = (by_head(t, 1) for t in self.keys_values(x, anchors))
        flat = (rows, self.kv_heads, blocks * repeats * width)
        far = queries.reshape(*flat, dim) @ context[0].swapaxes(-1, -2)
        far = far.reshape(*queries.shape[:-1], length)
        # Added, not selected: the gradient of an addition costs nothing.
        closed = mx.where(visible, 0.0, mx.finfo(far.dtype).min).astype(far.dtype)
        far = far + closed[:, None, :, None, None, :]
        near = queries @ keys.swapaxes(-1, -2)
        weights = mx.softmax(mx.concatenate([far, near], axis=-1), axis=-1, precise=True)
        far, near = mx.split(weights, [length], axis=-1)
        out = (far.reshape(*flat, length) @ context[1]).reshape(queries.shape) + near @ values
        out = out.transpose(0, 2, 1, 3, 4, 5)
        return self._merge(out.reshape(rows * blocks, self.heads, width, dim))

    def _split(self, x: mx.array, heads: int) -> mx.array:
        return x.reshape(*x.shape[:2], heads, self.head_dim).transpose(0, 2, 1, 3)

    def _merge(self, x: mx.array) -> mx.array:
        return self.o_proj(x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1))


class MLP(nn.Module):
    """Gated MLP: SiLU in Qwen3, tanh-GELU in Gemma 4."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.activation = nn.gelu_approx if config.architecture == "gemma4" else nn.silu

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """One pre-norm layer; Gemma 4's also normalises what each half adds, and scales the sum."""

    def __init__(self, config: DrafterConfig, window: int | None = None) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = DraftAttention(config, window)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.gemma = config.architecture == "gemma4"
        if self.gemma:
            self.pre_feedforward_layernorm = nn.RMSNorm(hidden, eps=eps)
            self.post_feedforward_layernorm = nn.RMSNorm(hidden, eps=eps)
            self.layer_scalar = mx.ones((1,))
            self.freeze(recurse=False, keys="layer_scalar")  # a constant of the checkpoint

    def __call__(self, x: mx.array, context: Any) -> mx.array:
        return self._finish(x, self.self_attn(self.input_layernorm(x), context))

    def over_blocks(
        self, x: mx.array, projected: mx.array, anchors: mx.array, visible: mx.array
    ) -> mx.array:
        context = self.self_attn.keys_values(projected, 0)
        attended = self.self_attn.over_blocks(self.input_layernorm(x), context, anchors, visible)
        return self._finish(x, attended)

    def _finish(self, x: mx.array, attended: mx.array) -> mx.array:
        if not self.gemma:
            x = x + attended
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar
