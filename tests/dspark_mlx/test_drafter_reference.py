"""The drafter computes DeepSpec's numbers: every output of the reference checkpoints."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from drafter_toys import DRAFTERS, NAMES

from dspark_mlx.draft.dspark.load_drafter import load_drafter

TOLERANCE = 1e-4


def difference(ours: mx.array, theirs: mx.array) -> float:
    assert ours.shape == theirs.shape
    return float(mx.abs(ours - theirs).max())


@pytest.mark.parametrize("name", NAMES)
def test_two_drafting_rounds_reproduce_the_reference(name: str) -> None:
    drafter = load_drafter(DRAFTERS / name)
    reference = mx.load(str(DRAFTERS / name / "reference.safetensors"))
    features = reference["infer.context_features"]
    context = drafter.make_context()
    for number in range(2):

        def expected(key: str, number: int = number) -> mx.array:
            return reference[f"infer.round{number}.{key}"]

        begin, end = expected("context_start").item(), expected("context_end").item()
        drafter.extend(features[:, begin:end], context, start=[begin])
        assert [cache.lengths for cache in context] == [[end], [end]]
        out = drafter.draft(expected("anchor").reshape(1), context)
        assert difference(out.hidden, expected("hidden")) < TOLERANCE
        assert difference(drafter.base_logits(out.hidden), expected("base_logits")) < TOLERANCE
        assert difference(out.logits, expected("logits")) < TOLERANCE
        assert out.tokens.tolist() == expected("tokens").tolist()
        assert out.confidence_logits is not None
        assert difference(out.confidence_logits, expected("confidence_logits")) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_training_blocks_reproduce_the_reference(name: str) -> None:
    drafter = load_drafter(DRAFTERS / name)
    reference = mx.load(str(DRAFTERS / name / "reference.safetensors"))
    ids = np.array(reference["train.input_ids"])
    anchors = np.array(reference["train.anchors"])
    places = np.minimum(anchors[..., None] + np.arange(drafter.block_size), ids.shape[1] - 1)
    previous = np.take_along_axis(ids[:, None], places, axis=2)
    out = drafter.forward_blocks(
        reference["train.context_features"], mx.array(anchors), mx.array(previous)
    )
    counted = np.array(reference["train.eval_mask"]).astype(bool)
    assert counted.sum() > 20
    for ours, key in ((out.logits, "draft_logits"), (out.confidence_logits, "confidence_logits")):
        gap = np.abs(np.array(ours) - np.array(reference[f"train.{key}"]))[counted]
        assert gap.max() < TOLERANCE
