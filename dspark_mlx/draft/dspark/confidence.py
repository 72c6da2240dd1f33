"""The confidence head: the chance that a drafted token survives verification.

A single linear unit on the slot's hidden state and, usually, the Markov
embedding of the token before it: never on the slot's own token, which keeps
every decision built on it non-anticipating. It is computed in float32 and never
quantised, because the scheduler multiplies these numbers along a block.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn


class ConfidenceHead(nn.Module):
    """``logit(c_k) = w . [h_k ; W1[x_{k-1}]] + b``, or of ``h_k`` alone."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def __call__(self, hidden: mx.array, embedded: mx.array | None) -> mx.array:
        """``hidden (..., H)``, ``embedded (..., R)`` or None: float32 logits ``(...)``."""
        features = hidden.astype(mx.float32)
        if embedded is not None:
            features = mx.concatenate([features, embedded.astype(mx.float32)], axis=-1)
        weight, bias = self.proj.weight.astype(mx.float32), self.proj.bias.astype(mx.float32)
        return features @ weight[0] + bias[0]
