"""One optimisation step: micro-batches of samples to a gradient, on one process or several.

A step consists of ``accumulate x processes`` micro-batches with one common mean,
so that the same micro-batches give the same gradient however they are shared out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ..draft.dspark.network import Drafter
from .blocks import Blocks, choose_anchors, make_blocks, pad
from .data import Sample
from .features import Features, FeatureSource
from .loss import Losses, dspark_loss
from .options import LossWeights
from .run_state import TrainingError


@dataclass(frozen=True)
class MicroBatch:
    """Samples with their blocks chosen: all that a step needs besides the features."""

    samples: list[Sample]
    blocks: Blocks

    @property
    def slots(self) -> int:
        return int(self.blocks.valid.sum())

    def weight(self, decay: float) -> float:
        """The sum of the loss weights of its slots."""
        return float((self.blocks.valid * slot_decay(self.blocks.valid.shape[-1], decay)).sum())


def slot_decay(width: int, decay: float) -> np.ndarray:
    return np.exp(-np.arange(width) / decay).astype(np.float32)


def prepare(
    samples: list[Sample], width: int, spacing: float, most: int, rng: np.random.Generator
) -> MicroBatch:
    """Choose anchors and make the blocks."""
    tokens, answer = pad(samples)
    anchors, real = choose_anchors(samples, spacing, most, rng)
    return MicroBatch(samples, make_blocks(tokens, answer, anchors, real, width))


@dataclass(frozen=True)
class BlockLosses:
    """The N real blocks of a micro-batch, G slots each."""

    losses: Losses
    """``accept`` is ``(N, G)``."""
    logits: mx.array
    """``(N, G, Vd)``."""
    confidence: mx.array | None
    """``(N, G)`` logits."""
    labels: np.ndarray
    """``(N, G)`` draft ids, -1 where the true token is not among them."""
    valid: np.ndarray
    """``(N, G)``."""
    rows: np.ndarray
    """``(N,)`` index of the sample each block belongs to."""


class StepComputer:
    """Losses and gradients of micro-batches. Owns no optimiser and no state."""

    def __init__(
        self,
        drafter: Drafter,
        source: FeatureSource,
        scale: LossWeights,
        hot_ids: np.ndarray | None,
        vocab_size: int,
    ) -> None:
        self.drafter, self.source, self.scale = drafter, source, scale
        self.to_draft = np.arange(vocab_size, dtype=np.int32)
        if hot_ids is not None:
            self.to_draft = np.full(vocab_size, -1, dtype=np.int32)
            self.to_draft[hot_ids] = np.arange(len(hot_ids))
        self._grad = nn.value_and_grad(drafter, self._total)

    def gradient(self, batch: MicroBatch, normalizer: float) -> tuple[Losses, Any]:
        """Losses and gradient of one micro-batch, sums divided by ``normalizer``; evaluated."""
        features = self.source.batch(batch.samples)
        (_, losses), gradient = self._grad(batch, features, mx.array(normalizer))
        mx.eval(losses.total, losses.accept, gradient)
        return losses, gradient

    def blocks(
        self, batch: MicroBatch, features: Features, normalizer: mx.array | None = None
    ) -> BlockLosses:
        """Run the drafter on the real blocks and compare every slot with the teacher."""
        blocks = batch.blocks
        rows, number, width = blocks.valid.shape
        hidden = self.drafter.block_hidden(
            features.taps, mx.array(blocks.anchors), mx.array(blocks.previous[..., 0])
        )
        # Padding anchors cost no head.
        real = np.flatnonzero(blocks.valid[..., 0])
        hidden = hidden.reshape(rows * number, width, -1)[mx.array(real)]
        previous = mx.array(blocks.previous.reshape(-1, width)[real])
        logits = self.drafter.block_logits(hidden, previous).astype(mx.float32)
        confidence = self.drafter.confidence(hidden, previous)
        valid = blocks.valid.reshape(-1, width)[real]
        labels = self.to_draft[blocks.labels.reshape(-1, width)[real]]
        weights = valid * slot_decay(width, self.scale.decay)
        losses = dspark_loss(
            logits.reshape(-1, logits.shape[-1]),
            None if confidence is None else confidence.reshape(-1),
            self._teacher(blocks, features, real),
            mx.array(labels.reshape(-1)),
            mx.array(weights.reshape(-1)),
            self.scale,
            normalizer,
        )
        losses = dataclasses.replace(losses, accept=losses.accept.reshape(-1, width))
        return BlockLosses(losses, logits, confidence, labels, valid, real // number)

    def _teacher(self, blocks: Blocks, features: Features, real: np.ndarray) -> mx.array:
        """Probabilities ``(N*G, Vd)`` of the target at the real blocks' places."""
        rows, _, width = blocks.valid.shape
        length, hidden = features.final.shape[1:]
        flat = blocks.places + (np.arange(rows) * length)[:, None, None]
        # Blocks overlap: each position's distribution is made once.
        unique, inverse = np.unique(flat.reshape(-1, width)[real], return_inverse=True)
        final = features.final.reshape(-1, hidden)[mx.array(unique)]
        norm = features.log_norm.reshape(-1)[mx.array(unique)]
        logits = self.source.teacher.logits(final, hot=True)
        # Slots that do not count may have no norm: they must stay finite all the same.
        teacher = mx.exp(mx.minimum(logits - norm[:, None], 0.0))
        return mx.stop_gradient(teacher)[mx.array(inverse.reshape(-1).astype(np.int32))]

    def _total(
        self, batch: MicroBatch, features: Features, normalizer: mx.array
    ) -> tuple[mx.array, Losses]:
        losses = self.blocks(batch, features, normalizer).losses
        return losses.total, losses


def add(total: Any, part: Any) -> Any:
    """Sum of two gradient trees, evaluated so that micro-batches do not pile up."""
    if total is None:
        return part
    total = tree_map(lambda a, b: a + b, total, part)
    mx.eval(total)
    return total


def share(gradient: Any, scalars: Sequence[float], group: Any | None) -> tuple[Any, list[float]]:
    """Sum gradient and scalars over all processes of ``group``; as they are without one."""
    if group is None or group.size() == 1:
        return gradient, list(scalars)
    # One message: a ring pays for every one of them.
    leaves = tree_flatten(gradient) if gradient is not None else []
    values = mx.array(list(scalars), dtype=mx.float32)
    packed = mx.concatenate([values, *(v.reshape(-1).astype(mx.float32) for _, v in leaves)])
    try:
        packed = mx.distributed.all_sum(packed, group=group)
        mx.eval(packed)
    except RuntimeError as error:
        raise TrainingError(
            f"the other processes of this run cannot be reached: {str(error).splitlines()[0]}",
            "what ended them is said there; the last checkpoint is whole",
        ) from None
    summed, at = packed[: len(scalars)].tolist(), len(scalars)
    shared = []
    for name, value in leaves:
        piece = packed[at : at + value.size].reshape(value.shape).astype(value.dtype)
        shared.append((name, piece))
        at += value.size
    return (tree_unflatten(shared) if leaves else None), summed
