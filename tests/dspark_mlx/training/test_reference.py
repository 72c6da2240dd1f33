"""Blocks, losses and gradients are DeepSpec's: every number under ``train.*`` is reproduced."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from drafter_toys import DRAFTERS, NAMES
from mlx.utils import tree_flatten

from dspark_mlx.draft.dspark.load_drafter import load_drafter
from dspark_mlx.draft.dspark.network import Drafter
from dspark_mlx.training.blocks import Blocks, make_blocks
from dspark_mlx.training.loss import Losses, dspark_loss, slot_decay
from dspark_mlx.training.train_options import LossWeights

TOLERANCE = 1e-4


def setup(name: str) -> tuple[Drafter, dict[str, mx.array], Blocks]:
    drafter = load_drafter(DRAFTERS / name)
    drafter.freeze_shared()
    reference = mx.load(str(DRAFTERS / name / "reference.safetensors"))
    blocks = make_blocks(
        np.array(reference["train.input_ids"]),
        np.array(reference["train.loss_mask"]) > 0,
        np.array(reference["train.anchors"]),
        np.array(reference["train.anchor_valid"]) > 0,
        drafter.block_size,
    )
    return drafter, reference, blocks


def losses_of(drafter: Drafter, reference: dict[str, mx.array], blocks: Blocks) -> Losses:
    teacher = mx.softmax(drafter.base_logits(reference["train.target_last_hidden"]), axis=-1)
    placed = mx.stack([p[mx.array(i)] for p, i in zip(teacher, blocks.places, strict=True)])
    out = drafter.forward_blocks(
        reference["train.context_features"], mx.array(blocks.anchors), mx.array(blocks.previous)
    )
    vocab = out.logits.shape[-1]
    return dspark_loss(
        out.logits.reshape(-1, vocab),
        None if out.confidence_logits is None else out.confidence_logits.reshape(-1),
        mx.stop_gradient(placed.reshape(-1, vocab)),
        mx.array(blocks.labels.reshape(-1)),
        mx.array((blocks.valid * slot_decay(blocks.valid.shape[-1], 4.0)).reshape(-1)),
        LossWeights(),
    )


@pytest.mark.parametrize("name", NAMES)
def test_labels_and_masks_are_the_references(name: str) -> None:
    _, reference, blocks = setup(name)
    counted = np.array(reference["train.eval_mask"]).astype(bool)
    assert np.array_equal(blocks.valid, counted)
    assert np.array_equal(blocks.labels[counted], np.array(reference["train.target_ids"])[counted])


@pytest.mark.parametrize("name", NAMES)
def test_the_three_losses_are_the_references(name: str) -> None:
    drafter, reference, blocks = setup(name)
    losses = losses_of(drafter, reference, blocks)
    for ours, key in (
        (losses.cross_entropy, "ce_loss"),
        (losses.total_variation, "l1_loss"),
        (losses.confidence, "confidence_loss"),
        (losses.total, "loss"),
    ):
        assert abs(ours.item() - reference[f"train.{key}"].item()) < TOLERANCE, key
    # The expected accepted length: survival summed along each block, plus the target's token.
    accept = np.array(losses.accept).reshape(blocks.valid.shape) * blocks.valid
    tau = 1 + np.cumprod(accept, axis=-1).sum() / blocks.valid[..., 0].sum()
    assert abs(tau - reference["train.tau_probabilistic"].item()) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_references(name: str) -> None:
    drafter, reference, blocks = setup(name)

    def total(model: Any) -> mx.array:
        return losses_of(model, reference, blocks).total

    gradient = dict(tree_flatten(nn.value_and_grad(drafter, total)(drafter)[1]))
    wanted = [key for key in reference if key.startswith("train.grad.")]
    assert len(wanted) >= 5
    for key in wanted:
        gap = mx.abs(gradient[key.removeprefix("train.grad.")] - reference[key]).max()
        assert gap.item() < TOLERANCE, key
    assert not any(key.startswith(("embed_tokens", "lm_head")) for key in gradient)
