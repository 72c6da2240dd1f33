"""DFlash 2: DFlash whose slots are mixed along the block, and whose tokens are selected in turn.

Around attention and MLP stands a grouped dynamic convolution along the block. With y the
input of the sublayer after its norm, (G, H), and c channels a group:

    delta = kernel_projection(y)                    (G, 2, taps, H / c)
    conv_s(z)[i] = sum_t (base[s, t] + delta[i, s, t, group]) * z[i - t]      s = 0, 1
    x = x + conv_1(sublayer(conv_0(y)))

where z[i - t] is 0 before the block's first slot. The selector then walks over the slots.
Of the K most likely tokens of slot k, by the logits u, and behind the token before it:

    score(c) = u(c) + <A[prev] * (P h_k), B[c]>
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ..model.cache import RowsKV
from .dspark.backbone import DraftLayer
from .dspark.config import DrafterConfig
from .dspark.layouts import bad
from .dspark.network import Drafter


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DrafterConfig):
    """A DFlash drafter with convolutions of ``conv_kernel_size`` taps and a selector."""

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            if not 1 <= getattr(self, key) <= self.vocab_size:
                raise bad(key, f"is not within 1..{self.vocab_size}")
        if self.hidden_size % self.conv_group_size:
            raise bad("conv_group_size", f"does not divide {self.hidden_size} channels")
        if self.draft_vocab_size not in (None, self.vocab_size):
            raise bad("draft_vocab_size", "is reduced, which no selector is made for")


class BlockConv(nn.Module):
    """The convolutions before (0) and after (1) one sublayer."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        hidden, self.taps = config.hidden_size, config.conv_kernel_size
        self.groups = hidden // config.conv_group_size
        self.base_kernel = mx.zeros((2, self.taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * self.taps * self.groups, bias=False)

    def kernels(self, y: mx.array) -> mx.array:
        """Kernels ``(B, G, 2, taps, H)`` made of the sublayer's input ``y (B, G, H)``."""
        delta = self.kernel_projection(y).reshape(*y.shape[:2], 2, self.taps, self.groups)
        every = mx.repeat(delta, y.shape[-1] // self.groups, axis=-1)
        kernels: mx.array = self.base_kernel + every
        return kernels

    def apply_kernel(self, z: mx.array, kernel: mx.array) -> mx.array:
        """``z (B, G, H)`` with ``kernel (B, G, taps, H)`` along the block."""
        out = kernel[:, :, 0] * z
        for t in range(1, self.taps):
            before = mx.pad(z, [(0, 0), (t, 0), (0, 0)])[:, : z.shape[1]]
            out = out + kernel[:, :, t] * before
        return out


class DFlash2Layer(DraftLayer):
    def __init__(self, config: DFlash2Config, window: int | None = None) -> None:
        super().__init__(config, window)
        self.attention_conv = BlockConv(config)
        self.mlp_conv = BlockConv(config)

    def __call__(self, x: mx.array, context: RowsKV) -> mx.array:
        y = self.input_layernorm(x)
        kernels = self.attention_conv.kernels(y)
        y = self.self_attn(self.attention_conv.apply_kernel(y, kernels[:, :, 0]), context)
        x = x + self.attention_conv.apply_kernel(y, kernels[:, :, 1])
        y = self.post_attention_layernorm(x)
        kernels = self.mlp_conv.kernels(y)
        y = self.mlp(self.mlp_conv.apply_kernel(y, kernels[:, :, 0]))
        return x + self.mlp_conv.apply_kernel(y, kernels[:, :, 1])


class CandidateSelector(nn.Module):
    """Codebooks A and B ``(V, R)`` over target ids, and the projection P of a slot's state."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = mx.zeros((config.vocab_size, config.selector_rank))
        self.successor_codebook = mx.zeros((config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def candidates(self, logits: mx.array) -> mx.array:
        """The K most likely ids ``(B, K)`` of ``logits (B, V)``, the likeliest first."""
        top = mx.argpartition(-logits, self.top_k - 1, axis=-1)[:, : self.top_k]
        order = mx.argsort(-mx.take_along_axis(logits, top, axis=-1), axis=-1)
        return mx.take_along_axis(top, order, axis=-1)

    def scores(
        self, logits: mx.array, previous: mx.array, hidden: mx.array, ids: mx.array
    ) -> mx.array:
        """Scores ``(B, K)`` of candidates ``ids`` behind ``previous (B,)``."""
        last = self.predecessor_codebook.shape[0] - 1
        query = self.predecessor_codebook[mx.minimum(previous, last)]
        query = query * self.hidden_projection(hidden)  # (B, R)
        pair = (query[:, None] * self.successor_codebook[ids]).sum(axis=-1)
        return mx.take_along_axis(logits, ids, axis=-1) + pair


class DFlash2(Drafter):
    """A ``Drafter`` with convolutions in its layers and the selector as its sequential head."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    def _make_layer(self, config: DrafterConfig, window: int | None) -> DraftLayer:
        assert isinstance(config, DFlash2Config)
        return DFlash2Layer(config, window)

    def slot_logits(
        self, base: mx.array, previous: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """The scores at the candidates' places, -inf at all others: ``(B, V)``."""
        ids = self.candidate_selector.candidates(base)
        scores = self.candidate_selector.scores(base, previous, hidden, ids)
        closed = mx.full(base.shape, -mx.inf, dtype=base.dtype)
        return mx.put_along_axis(closed, ids, scores.astype(base.dtype), axis=-1), state
