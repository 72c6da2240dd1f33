"""Laws of drafting: rows do not meet, context only grows, slots stay in order."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from drafter_toys import DRAFTERS, NAMES, toy_config, toy_drafter
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from dspark_mlx.draft.dspark.load_drafter import load_drafter
from dspark_mlx.draft.dspark.network import Drafter
from dspark_mlx.errors import CacheError, PairingError

DRAFTER = {name: load_drafter(DRAFTERS / name) for name in NAMES}


def features_for(drafter: Drafter, seed: int, rows: int, length: int) -> mx.array:
    key = mx.random.key(seed)
    return mx.random.normal((rows, length, drafter.config.feature_size), key=key)


def close(a: mx.array | None, b: mx.array | None, tolerance: float = 2e-5) -> bool:
    assert a is not None and b is not None and a.shape == b.shape
    return float(mx.abs(a - b).max()) < tolerance


def single(drafter: Drafter, features: mx.array, anchor: int):
    context = drafter.make_context()
    if features.shape[1]:
        drafter.extend(features, context)
    return drafter.draft(mx.array([anchor]), context)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    lengths=st.lists(st.integers(0, 7), min_size=2, max_size=4),
    seed=st.integers(0, 10_000),
)
def test_ragged_rows_draft_as_single_rows(name: str, lengths: list[int], seed: int) -> None:
    drafter, rows = DRAFTER[name], len(lengths)
    features = features_for(drafter, seed, rows, max(lengths) or 1)
    anchors = mx.random.randint(0, 95, (rows,), key=mx.random.key(seed))
    context = drafter.make_context(rows)
    drafter.extend(features, context, counts=lengths)
    assert context[0].lengths == lengths
    together = drafter.draft(anchors, context)
    for r, length in enumerate(lengths):
        alone = single(drafter, features[r : r + 1, :length], anchors[r].item())
        assert together.tokens[r].tolist() == alone.tokens[0].tolist()
        assert close(together.logits[r], alone.logits[0])
        assert close(together.confidence_logits[r], alone.confidence_logits[0])


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    seed=st.integers(0, 10_000),
)
def test_context_grown_in_pieces_equals_context_given_at_once(
    name: str, cuts: list[int], seed: int
) -> None:
    drafter, total = DRAFTER[name], sum(cuts)
    features = features_for(drafter, seed, 1, total)
    context, at = drafter.make_context(), 0
    for cut in cuts:
        # Each piece overshoots with rejected positions, forgotten by the next piece's start.
        rejected = features_for(drafter, seed + 1, 1, 2)
        piece = mx.concatenate([features[:, at : at + cut], rejected], axis=1)
        drafter.extend(piece, context, start=[at])
        drafter.draft(mx.array([3]), context)
        at += cut
    for cache in context:
        cache.trim_to([total])
    pieces, whole = drafter.draft(mx.array([3]), context), single(drafter, features, 3)
    assert close(pieces.logits, whole.logits)
    assert pieces.tokens.tolist() == whole.tokens.tolist()


VARIANTS = {
    "gemma4_with_v_proj": {"architecture": "gemma4", "final_logit_softcapping": 30.0},
    "biased_llama3_rope": {
        "attention_bias": True,
        "rope_parameters": {
            "rope_theta": 1e4,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


@pytest.mark.parametrize("name", [*NAMES, *VARIANTS])
def test_training_and_drafting_see_the_same(name: str) -> None:
    """A block at anchor n in training = a draft behind a context of n positions."""
    drafter = toy_drafter(**VARIANTS[name]) if name in VARIANTS else DRAFTER[name]
    features = features_for(drafter, 5, 1, 9)
    anchors = mx.array([[0, 1, 4, 8]])
    drafts = [single(drafter, features[:, :n], 10 + n) for n in anchors[0].tolist()]
    previous = mx.stack(
        [mx.concatenate([mx.array([10 + n]), d.tokens[0, :-1]]) for n, d in _pairs(anchors, drafts)]
    )[None]
    out = drafter.forward_blocks(features, anchors, previous)
    assert close(out.hidden[0], mx.concatenate([d.hidden for d in drafts]))
    assert close(out.logits[0], mx.concatenate([d.logits for d in drafts]))
    assert close(out.confidence_logits[0], mx.concatenate([d.confidence_logits for d in drafts]))


def _pairs(anchors: mx.array, drafts: list) -> zip:
    return zip(anchors[0].tolist(), drafts, strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_block_sees_no_position_from_its_anchor_on(name: str) -> None:
    drafter = DRAFTER[name]
    features = features_for(drafter, 6, 1, 8)
    anchors, previous = mx.array([[3, 6]]), mx.ones((1, 2, 5), dtype=mx.int32)
    before = drafter.forward_blocks(features, anchors, previous).logits
    features[:, 6:] = 100.0
    after = drafter.forward_blocks(features, anchors, previous).logits
    assert close(before, after, 1e-6)
    features[:, 5] = 100.0
    changed = drafter.forward_blocks(features, anchors, previous).logits
    assert close(before[:, 0], changed[:, 0], 1e-6)
    assert not close(before[:, 1], changed[:, 1], 1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_short_draft_is_the_front_of_the_full_one(name: str) -> None:
    drafter = DRAFTER[name]
    context = drafter.make_context()
    drafter.extend(features_for(drafter, 1, 1, 6), context)
    full = drafter.draft(mx.array([3]), context)
    for width in range(1, drafter.block_size + 1):
        short = drafter.draft(mx.array([3]), context, width)
        assert short.tokens.tolist() == full.tokens[:, :width].tolist()
        assert close(short.logits, full.logits[:, :width])
        assert close(short.confidence_logits, full.confidence_logits[:, :width])


@pytest.mark.parametrize("name", NAMES)
def test_narrow_block_equals_a_drafter_of_that_block_size(name: str) -> None:
    drafter = DRAFTER[name]
    context = drafter.make_context()
    drafter.extend(features_for(drafter, 1, 1, 6), context)
    out = drafter.draft(mx.array([3]), context, 3, narrow=True)
    assert out.tokens.shape == (1, 3)
    assert not close(out.hidden, drafter.draft(mx.array([3]), context, 3).hidden, 1e-4)
    assert close(out.hidden, drafter.backbone(mx.array([3]), context, 3))
    assert context[0].lengths == [6]


@pytest.mark.parametrize("width", [0, -1, 6])
def test_draft_length_beyond_the_block_is_refused(width: int) -> None:
    drafter = DRAFTER["qwen3_vanilla"]
    with pytest.raises(PairingError, match=rf"draft length {width} is outside 1\.\.5"):
        drafter.draft(mx.array([3]), drafter.make_context(), width)


def test_gap_in_the_context_is_refused() -> None:
    drafter = DRAFTER["qwen3_vanilla"]
    context = drafter.make_context()
    drafter.extend(features_for(drafter, 1, 1, 4), context)
    with pytest.raises(CacheError, match="ends at position 4, but the new features begin at 5"):
        drafter.extend(features_for(drafter, 1, 1, 4), context, start=[5])
    assert context[0].lengths == [4]


@pytest.mark.parametrize("name", NAMES)
def test_sampler_sees_the_logits_its_token_is_reported_with(name: str) -> None:
    drafter = DRAFTER[name]
    context = drafter.make_context()
    drafter.extend(features_for(drafter, 2, 1, 6), context)
    seen: list[mx.array] = []

    def second_best(logits: mx.array, k: int) -> mx.array:
        assert k == len(seen)
        seen.append(logits)
        return mx.argsort(logits, axis=-1)[:, -2]

    out = drafter.draft(mx.array([3]), context, sampler=second_best)
    assert close(mx.stack(seen, axis=1), out.logits)
    assert out.tokens.tolist() == mx.argsort(out.logits, axis=-1)[..., -2].tolist()
    greedy = drafter.draft(mx.array([3]), context)
    assert close(greedy.logits[:, 0], out.logits[:, 0])
    depends = not close(greedy.logits[:, 1:], out.logits[:, 1:], 1e-3)
    assert depends == (drafter.markov_head is not None)


@pytest.mark.parametrize("name", NAMES)
def test_confidence_never_looks_at_its_own_token(name: str) -> None:
    """non_anticipating: c_k is decided before x_k is drawn."""
    drafter = DRAFTER[name]
    context = drafter.make_context()
    drafter.extend(features_for(drafter, 2, 1, 6), context)
    for changed in range(drafter.block_size):

        def other_at(logits: mx.array, k: int, changed: int = changed) -> mx.array:
            return mx.argsort(logits, axis=-1)[:, -2 if k == changed else -1]

        greedy = drafter.draft(mx.array([3]), context).confidence_logits
        other = drafter.draft(mx.array([3]), context, sampler=other_at).confidence_logits
        assert greedy[:, : changed + 1].tolist() == other[:, : changed + 1].tolist()


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", None])
def test_reduced_vocabulary_proposes_target_ids(kind: str | None) -> None:
    ids = [3, 5, 8, 13, 21, 34, 55, 89]
    drafter = toy_drafter(
        draft_vocab_size=8,
        markov_head_type=kind,
        markov_rank=8 if kind else 0,
        confidence_head_with_markov=bool(kind),
    )
    drafter.set_draft_vocabulary(mx.array(ids))
    context = drafter.make_context()
    drafter.extend(features_for(drafter, 2, 1, 6), context)
    out = drafter.draft(mx.array([77]), context)
    assert out.logits.shape == (1, 5, 8)
    assert out.draft_ids.tolist() == mx.argmax(out.logits, axis=-1).tolist()
    assert out.tokens.tolist() == [[ids[i] for i in out.draft_ids[0].tolist()]]
    # Teacher-forced on the target ids it drafted, training gives the very same logits.
    previous = mx.concatenate([mx.array([[77]]), out.tokens[:, :-1]], axis=1)[:, None]
    blocks = drafter.forward_blocks(features_for(drafter, 2, 1, 6), mx.array([[6]]), previous)
    assert close(blocks.logits[:, 0], out.logits)


def test_silent_anchor_slot_predicts_nothing() -> None:
    """Speculators' bonus anchor: one slot more in the block, none more in the draft."""
    drafter = toy_drafter(sample_from_anchor=False)
    context = drafter.make_context()
    features = features_for(drafter, 3, 1, 6)
    drafter.extend(features, context)
    out = drafter.draft(mx.array([4]), context)
    assert out.tokens.shape == (1, 5)
    wide = Drafter(toy_config(block_size=6))
    wide.update(drafter.parameters())
    assert close(out.hidden, wide.backbone(mx.array([4]), context)[:, 1:])
    previous = mx.concatenate([mx.array([[4]]), out.tokens[:, :-1]], axis=1)[:, None]
    blocks = drafter.forward_blocks(features, mx.array([[6]]), previous)
    assert close(blocks.logits[:, 0], out.logits)


def test_nothing_is_evaluated_while_drafting() -> None:
    """One sync a round: the graph of a draft can be built from tokens not yet computed."""
    drafter = DRAFTER["qwen3_rnn"]

    @mx.compile
    def whole_round(features: mx.array, anchor: mx.array) -> mx.array:
        context = drafter.make_context()
        drafter.extend(features, context)
        return drafter.draft(anchor, context).tokens

    features = features_for(drafter, 4, 1, 6)
    traced = whole_round(features, mx.array([3]))
    assert traced.tolist() == single(drafter, features, 3).tokens.tolist()


def test_anchor_beyond_the_drafters_table_is_harmless() -> None:
    drafter = toy_drafter()
    context = drafter.make_context()
    drafter.extend(features_for(drafter, 4, 1, 6), context)
    out = drafter.draft(mx.array([5_000]), context)
    assert np.isfinite(np.array(out.logits)).all()
    assert out.tokens.tolist() == drafter.draft(mx.array([95]), context).tokens.tolist()


def test_embedding_and_head_are_not_trained() -> None:
    trained = {name for name, _ in tree_flatten(toy_drafter().trainable_parameters())}
    assert not any(name.startswith(("embed_tokens", "lm_head")) for name in trained)
    assert {"fc.weight", "markov_head.markov_w1.weight", "confidence_head.proj.weight"} <= trained
