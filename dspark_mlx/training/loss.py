"""The loss of section 3.3: cross-entropy, total variation and confidence, decaying along a block.

``loss = 0.1 CE + 0.9 L1(p_draft, p_target) + 1.0 BCE(confidence, 1 - L1 / 2)``,
each the mean over valid slots weighted ``exp(-(k - 1) / 4)`` for slot k = 1..G.
``1 - L1 / 2`` is the chance that verification accepts a token of the slot.

With a draft vocabulary the target's distribution keeps its mass outside of it: the drafter can
put none there, so all of that mass counts in L1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .train_options import LossWeights


@dataclass(frozen=True)
class Losses:
    """Scalars, each normalised; ``accept (N,)`` is ``1 - L1 / 2`` of every slot."""

    total: mx.array
    cross_entropy: mx.array
    total_variation: mx.array
    confidence: mx.array
    accept: mx.array


def slot_decay(width: int, decay: float) -> np.ndarray:
    """Weights ``exp(-k / decay)`` of slots k = 0 .. width - 1, float32."""
    weights: np.ndarray = np.exp(-np.arange(width) / decay)
    return weights.astype(np.float32)


@mx.custom_function
def _divergences(
    logits: mx.array, teacher: mx.array, labels: mx.array
) -> tuple[mx.array, mx.array]:
    draft = mx.softmax(logits, axis=-1)
    at_label = mx.take_along_axis(draft, mx.maximum(labels, 0)[:, None], axis=-1)[:, 0]
    entropy = mx.where(labels >= 0, -mx.log(mx.maximum(at_label, 1e-37)), 0.0)
    return entropy, _distance(draft, teacher).sum(-1) + mx.maximum(1 - teacher.sum(-1), 0.0)


@_divergences.vjp
def _divergences_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
    """By hand: one softmax serves both terms, and no (N, V) array is kept from the forward."""
    logits, teacher, labels = primals
    by_entropy, by_variation = cotangents
    by_entropy = mx.where(labels >= 0, by_entropy, 0.0)
    draft = mx.softmax(logits, axis=-1)
    mean = _signed(draft, teacher).sum(-1, keepdims=True)
    gradient = _combine(draft, teacher, mean, by_entropy[:, None], by_variation[:, None])
    rows = mx.arange(labels.shape[0])
    gradient = gradient.at[rows, mx.maximum(labels, 0)].subtract(by_entropy)
    return gradient, mx.zeros_like(teacher), mx.zeros_like(labels)


# Fused: each would otherwise pass over (N, V) several times.


@mx.compile
def _distance(draft: mx.array, teacher: mx.array) -> mx.array:
    return mx.abs(draft - teacher)


@mx.compile
def _signed(draft: mx.array, teacher: mx.array) -> mx.array:
    return draft * mx.sign(draft - teacher)


@mx.compile
def _combine(
    draft: mx.array, teacher: mx.array, mean: mx.array, by_entropy: mx.array, by_variation: mx.array
) -> mx.array:
    return draft * (by_entropy + by_variation * (mx.sign(draft - teacher) - mean))


def divergences(logits: mx.array, teacher: mx.array, labels: mx.array) -> tuple[mx.array, mx.array]:
    """Cross-entropy and L1 of every slot, ``(N,)`` each.

    ``logits (N, Vd)``; ``teacher (N, Vd)`` probabilities, a constant, whose sum
    may fall short of 1 by the mass outside the draft vocabulary; ``labels (N,)``
    draft ids, -1 where the true token is not among them (no cross-entropy then).
    """
    found: Any = _divergences(logits, teacher, labels)
    return tuple(found)


def dspark_loss(
    logits: mx.array,
    confidence: mx.array | None,
    teacher: mx.array,
    labels: mx.array,
    weights: mx.array,
    scale: LossWeights,
    normalizer: mx.array | None = None,
) -> Losses:
    """All terms over N slots: ``weights (N,)`` from ``slot_decay``, ``confidence (N,)`` logits.

    ``normalizer`` is what sums are divided by, the sum of the weights unless
    several processes or micro-batches share one mean.
    """
    entropy, variation = divergences(logits, teacher, labels)
    accept = mx.stop_gradient(1 - variation / 2)
    below = mx.maximum(weights.sum(), 1e-6) if normalizer is None else normalizer

    def mean(values: mx.array) -> mx.array:
        return (values * weights).sum() / below

    by_entropy, by_variation, by_confidence = mean(entropy), mean(variation), mx.array(0.0)
    if confidence is not None:
        # max(c, 0) - c y + log(1 + exp(-|c|)): finite for every logit.
        bce = (
            mx.maximum(confidence, 0) - confidence * accept + mx.log1p(mx.exp(-mx.abs(confidence)))
        )
        by_confidence = mean(bce)
    total = (
        scale.cross_entropy * by_entropy
        + scale.total_variation * by_variation
        + scale.confidence * by_confidence
    )
    return Losses(total, by_entropy, by_variation, by_confidence, accept)
