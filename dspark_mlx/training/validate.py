"""How good a drafter is on held-out answers, teacher-forced: cheap enough to run while training.

The greedy accepted length at an anchor is one plus the number of slots in a row whose most likely
token is the true one. On answers made at temperature 0 a greedy round that begins there would
accept as many. The sampled accepted length is one plus the sum over k of the product of
``1 - L1 / 2`` along slots 1..k. ``dspark eval`` plays real rounds instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from .data import TrainingSample
from .step import MicroBatch, StepComputer, prepare, share


@dataclass
class Validation:
    """Means over held-out blocks.

    ``greedy`` is the greedy accepted length on answers of temperature 0 (on all answers if there
    are none of these), ``by_domain`` the same for each domain. ``sampled`` is the expected
    accepted length at temperature 1. ``by_slot[k - 1]`` is the share of greedy blocks whose slots
    1..k all match. ``confidence_gap`` is the mean of confidence minus acceptance.
    """

    loss: float
    greedy: float
    sampled: float
    by_domain: dict[str, float] = field(default_factory=dict)
    by_slot: list[float] = field(default_factory=list)
    confidence_gap: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def validation_batches(
    samples: Sequence[TrainingSample], most: int, batch_tokens: int, width: int, spacing: float
) -> list[MicroBatch]:
    """Up to ``most`` samples with their blocks, the same every time.

    Domains take turns, and answers of temperature 0 come first.
    """
    rng = np.random.default_rng(1234)
    groups: dict[str, list[TrainingSample]] = defaultdict(list)
    for i in rng.permutation(len(samples)):
        groups[samples[i].domain].append(samples[i])
    for group in groups.values():
        group.sort(key=lambda s: s.temperature != 0)
    chosen: list[TrainingSample] = []
    while len(chosen) < min(most, len(samples)):
        for group in groups.values():
            if group and len(chosen) < most:
                chosen.append(group.pop(0))
    chosen.sort(key=len)
    batches: list[list[TrainingSample]] = [[]]
    for sample in chosen:
        if batches[-1] and len(sample) * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
        batches[-1].append(sample)
    return [prepare(b, width, spacing, 512, rng) for b in batches if b]


def validate(
    computer: StepComputer, batches: Sequence[MicroBatch], group: Any | None = None
) -> Validation:
    """Run the drafter over ``batches`` without learning; the processes of ``group`` share them."""
    greedy_only = any(s.temperature == 0 for b in batches for s in b.samples)
    domains = sorted({s.domain for b in batches for s in b.samples})
    width = batches[0].blocks.valid.shape[-1]
    totals = np.zeros(5)  # loss, gap, their weight; sampled length, its blocks
    slots = np.zeros((len(domains), width + 1))  # blocks alive at each slot, and all blocks
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    for batch in batches[rank::world]:
        features = computer.source.batch(batch.samples)
        out = computer.blocks(batch, features)
        best = out.logits.argmax(-1)
        chance = mx.zeros_like(out.losses.accept)
        if out.confidence is not None:
            chance = mx.sigmoid(out.confidence).reshape(chance.shape)
        mx.eval(out.losses.total, out.losses.accept, best, chance)
        portion = batch.weight(computer.scale.decay)
        accept = np.array(out.losses.accept) * out.valid
        gap = ((np.array(chance) - accept) * out.valid).sum() / out.valid.sum()
        alive = np.cumprod(accept, axis=-1).sum()
        totals += [out.losses.total.item() * portion, gap * portion, portion, alive, len(accept)]
        hits = np.cumprod((np.array(best) == out.labels) & out.valid, axis=-1)
        for row, hit in zip(out.rows, hits, strict=True):
            sample = batch.samples[row]
            if sample.temperature == 0 or not greedy_only:
                slots[domains.index(sample.domain)] += [*hit, 1]
    _, summed = share(None, [*totals, *slots.reshape(-1)], group)
    loss, gap, weight, alive, blocks = summed[:5]
    slots = np.array(summed[5:]).reshape(slots.shape)
    survival = slots[:, :width].sum(0) / slots[:, width].sum()
    return Validation(
        loss=loss / weight,
        greedy=float(1 + survival.sum()),
        sampled=1 + alive / blocks,
        by_domain={
            name: float(1 + row[:width].sum() / row[width])
            for name, row in zip(domains, slots, strict=True)
            if row[width]
        },
        by_slot=[float(v) for v in survival],
        confidence_gap=gap / weight,
    )
