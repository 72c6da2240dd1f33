"""One optimiser step: micro-batches of samples to a gradient to new weights.

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
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map, tree_unflatten

from ..draft.dspark.network import Drafter
from .blocks import Blocks, choose_anchors, make_blocks, pad
from .checkpoint import TrainingError, flat_arrays
from .data import TrainingSample
from .features import Features, FeatureSource
from .loss import Losses, dspark_loss, slot_decay
from .train_options import LossWeights, TrainOptions


@dataclass(frozen=True)
class StepReport:
    """What one step did, for the log and the progress line.

    ``accepted`` is the expected accepted length at temperature 1 on the training blocks.
    """

    step: int
    loss: float
    cross_entropy: float
    total_variation: float
    confidence: float
    accepted: float
    by_slot: list[float]
    lr: float
    gradient_norm: float
    tokens: int
    slots: int
    seconds: float
    epoch: int


@dataclass(frozen=True)
class MicroBatch:
    """Samples and their blocks: all that a step needs apart from the features."""

    samples: list[TrainingSample]
    blocks: Blocks

    @property
    def slots(self) -> int:
        return int(self.blocks.valid.sum())

    def weight(self, decay: float) -> float:
        """The sum of the loss weights of its slots."""
        return float((self.blocks.valid * slot_decay(self.blocks.valid.shape[-1], decay)).sum())


def prepare(
    samples: list[TrainingSample], width: int, spacing: float, most: int, rng: np.random.Generator
) -> MicroBatch:
    """Choose random anchors in ``samples`` and make their blocks of ``width`` slots."""
    tokens, answer = pad(samples)
    anchors, real = choose_anchors(samples, spacing, most, rng)
    return MicroBatch(samples, make_blocks(tokens, answer, anchors, real, width))


@dataclass(frozen=True)
class BlockLosses:
    """The N real blocks of a micro-batch with G slots each.

    ``losses.accept (N, G)``; ``logits (N, G, Vd)``; ``confidence (N, G)`` logits; ``labels
    (N, G)`` draft ids, -1 where the true token is not one of them; ``valid (N, G)``; ``rows (N,)``
    is the index of the sample that a block belongs to.
    """

    losses: Losses
    logits: mx.array
    confidence: mx.array | None
    labels: np.ndarray
    valid: np.ndarray
    rows: np.ndarray


class StepComputer:
    """Losses and gradients of micro-batches. Owns no optimiser and no state."""

    def __init__(
        self,
        drafter: Drafter,
        source: FeatureSource,
        scale: LossWeights,
        vocab_ids: np.ndarray | None,
        vocab_size: int,
    ) -> None:
        self.drafter: Any = drafter  # mlx does not type the methods of a module
        self.source, self.scale = source, scale
        self.to_draft = np.arange(vocab_size, dtype=np.int32)
        if vocab_ids is not None:
            self.to_draft = np.full(vocab_size, -1, dtype=np.int32)
            self.to_draft[vocab_ids] = np.arange(len(vocab_ids))
        self._grad: Any = nn.value_and_grad(drafter, self._total)

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
        logits = self.source.teacher.logits(final, draft=True)
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
    leaves = flat_arrays(gradient) if gradient is not None else {}
    values = mx.array(list(scalars), dtype=mx.float32)
    packed = mx.concatenate([values, *(v.reshape(-1).astype(mx.float32) for v in leaves.values())])
    try:
        packed = mx.distributed.all_sum(packed, group=group)
        mx.eval(packed)
    except RuntimeError as error:
        raise TrainingError(
            f"the other processes of this run cannot be reached: {str(error).splitlines()[0]}",
            "what ended them is said there; the last checkpoint is whole",
        ) from None
    summed: Any = packed[: len(scalars)].tolist()
    shared, at = [], len(scalars)
    for name, value in leaves.items():
        piece = packed[at : at + value.size].reshape(value.shape).astype(value.dtype)
        shared.append((name, piece))
        at += value.size
    return (tree_unflatten(shared) if leaves else None), summed


class RunOptimizer:
    """AdamW for everything, or Muon for the matrices of the backbone and AdamW for the rest.

    Muon orthogonalises the step of each matrix, which learns faster from few steps; its authors
    leave tables, norms and the vectors of heads to AdamW. Both follow one learning rate schedule.
    """

    def __init__(self, options: TrainOptions) -> None:
        self.options = options
        adam = optim.AdamW(
            learning_rate=options.lr,
            betas=list(options.betas),
            weight_decay=options.weight_decay,
            bias_correction=True,
        )
        self.parts: list[optim.Optimizer] = [adam]
        self.peaks = [options.lr]
        self.inner: optim.Optimizer = adam
        if options.optimizer == "muon":
            muon = optim.Muon(learning_rate=options.muon_lr, weight_decay=0.0)
            self.parts, self.peaks = [muon, adam], [options.muon_lr, options.lr]
            self.inner = optim.MultiOptimizer(self.parts, [is_matrix])

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = value

    def init(self, parameters: Any) -> None:
        self.inner.init(parameters)

    def update(self, model: Any, gradient: Any, step: int) -> float:
        """Apply ``gradient`` at ``step`` (from 0). Returns the learning rate of AdamW."""
        share = self.options.lr_share(step)
        for part, peak in zip(self.parts, self.peaks, strict=True):
            part.learning_rate = peak * share
        self.inner.update(model, gradient)
        return self.options.lr * share


def is_matrix(name: str, value: mx.array) -> bool:
    """Whether Muon trains it: a matrix of the layers, or ``fc``."""
    return value.ndim == 2 and name.split(".")[0] in ("layers", "fc")
