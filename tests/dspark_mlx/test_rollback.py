"""rollback: after any accept pattern, caches and logits equal a fresh run on the same tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from decoding import (
    ScriptProposer,
    Whims,
    dspark,
    make_engine,
    plain_text,
    request,
    run,
    run_one,
    toy_target,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from toys import MODELS, VOCAB, hybrid_toy, prompt

from dspark_mlx.draft.lookup import LookupProposer
from dspark_mlx.errors import CacheError, DsparkError
from dspark_mlx.loading import choose_method
from dspark_mlx.model import cache
from dspark_mlx.model.cache import QuantizedRowsKV, RowsKV
from dspark_mlx.model.rows import Rows
from dspark_mlx.model.target import Target

KINDS = [(kind, None) for kind in MODELS] + [("llama", 8), ("llama-window", 8), ("gemma3", 4)]


@pytest.fixture(params=[None, 8], ids=["roomy", "tight"])
def buffers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with buffers so small that windows are shifted and storage grows all the time."""
    if request.param is not None:
        monkeypatch.setattr(cache, "GROWTH", request.param)
        monkeypatch.setattr(cache, "SLACK", request.param)


def visible(layer: RowsKV, row: int) -> tuple[int, list[np.ndarray]]:
    """First stored position that a next token may see, and all stored from there on."""
    length, start = layer.lengths[row], layer.start[row]
    first = 0 if layer.window is None else max(0, length - layer.window + 1)
    assert start <= first, "a position inside the window is gone"
    if not length:
        return 0, []
    if isinstance(layer, QuantizedRowsKV):
        pair = [
            mx.dequantize(*three, group_size=layer.group_size, bits=layer.bits)
            for three in (layer.parts[:3], layer.parts[3:])
        ]
    else:
        pair = layer.parts
    return first, [np.array(part[row, :, first - start : length - start]) for part in pair]


def assert_fresh(target: Target, rows: Rows, texts: list[list[int]], tolerance: float) -> None:
    """``rows`` holds the texts, and continues them, as rows that never saw anything else."""
    assert rows.lengths == [len(text) for text in texts]
    probe = mx.array([[7, 8]] * len(texts))
    logits = target.forward(probe, rows)[0]
    rows.trim_to([len(text) for text in texts])
    for r, text in enumerate(texts):
        alone = target.make_rows()
        target.forward(mx.array([text]), alone)
        alone.trim_to([len(text)])
        for ours, theirs in zip(rows.layers, alone.layers, strict=True):
            ours_first, ours_parts = visible(ours, r)
            theirs_first, theirs_parts = visible(theirs, 0)
            assert ours_first == theirs_first
            for a, b in zip(ours_parts, theirs_parts, strict=True):
                assert a == pytest.approx(b, abs=tolerance)
        own = target.forward(probe[r : r + 1], alone)[0]
        size = float(mx.abs(own).max())
        assert np.array(logits[r]) == pytest.approx(np.array(own[0]), abs=tolerance * size)


@pytest.mark.usefixtures("buffers")
@pytest.mark.parametrize(("kind", "bits"), KINDS, ids=str)
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_any_accept_pattern(kind: str, bits: int | None, data: st.DataObject) -> None:
    """One to three ragged rows, drafts of any width, any part of them accepted."""
    target = toy_target(kind, kv_bits=bits)
    draw = data.draw
    texts = [prompt(draw(st.integers(1, 30)), seed) for seed in range(draw(st.integers(1, 3)))]
    rows: Rows | None = None
    for text in texts:
        one = target.make_rows()
        target.forward(mx.array([text]), one)
        one.trim_to([len(text)])
        if rows is None:
            rows = one
        else:
            rows.extend(one)
    assert rows is not None
    for _ in range(draw(st.integers(1, 6))):
        width = draw(st.integers(1, 9))
        block = draw(
            st.lists(
                st.lists(st.integers(0, VOCAB - 1), min_size=width, max_size=width),
                min_size=len(texts),
                max_size=len(texts),
            )
        )
        target.forward(mx.array(block), rows)
        for r, text in enumerate(texts):
            text.extend(block[r][: draw(st.integers(0, width))])
        rows.trim_to([len(text) for text in texts])
    assert_fresh(target, rows, texts, 1e-4 if bits is None else 0.05)


@pytest.mark.usefixtures("buffers")
@pytest.mark.parametrize(("kind", "bits"), [("llama-window", None), ("gemma3", 8)], ids=str)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_rows_that_join_and_leave_between_rounds(
    kind: str, bits: int | None, data: st.DataObject
) -> None:
    target = toy_target(kind, kv_bits=bits)
    draw = data.draw
    texts: list[list[int]] = []
    rows: Rows | None = None
    for step in range(draw(st.integers(2, 8))):
        act = draw(st.sampled_from(["join", "leave", "round", "round", "extract"]))
        if act == "join" or rows is None:
            text = prompt(draw(st.integers(1, 40)), step)
            one = target.make_rows()
            target.forward(mx.array([text]), one)
            one.trim_to([len(text)])
            rows = one if rows is None else rows
            if rows is not one:
                rows.extend(one)
            texts.append(text)
        elif act == "leave":
            stay = draw(st.permutations(range(len(texts))))[: draw(st.integers(1, len(texts)))]
            rows.filter(stay)
            texts = [texts[r] for r in stay]
        elif act == "round":
            width = draw(st.integers(1, 9))
            target.forward(mx.array([prompt(width, step + r) for r in range(len(texts))]), rows)
            for r, text in enumerate(texts):
                text.extend(prompt(width, step + r)[: draw(st.integers(0, width))])
            rows.trim_to([len(text) for text in texts])
        else:
            row = draw(st.integers(0, len(texts) - 1))
            assert_fresh(target, rows.extract(row), [list(texts[row])], 1e-4 if not bits else 0.05)
    assert rows is not None
    assert_fresh(target, rows, texts, 1e-4 if bits is None else 0.05)


@pytest.mark.usefixtures("buffers")
@pytest.mark.parametrize("policy", ["off", "fixed", "whims"])
@pytest.mark.parametrize(("kind", "bits"), [*KINDS[:4], ("llama", 8)], ids=str)
def test_what_a_reply_leaves_behind_is_a_fresh_state(
    kind: str, bits: int | None, policy: str
) -> None:
    """Target's and drafter's caches of finished replies, whatever rounds made them."""
    target = toy_target(kind, kv_bits=bits)
    lessons = [
        [*prompt(9 + i, i), *plain_text(kind, tuple(prompt(9 + i, i)), 20)] for i in range(3)
    ]
    proposer = dspark(target, block=4, lessons=lessons)
    chosen: Any = Whims(7) if policy == "whims" else policy
    engine = make_engine(target, [proposer], policy=chosen, prefill_chunk=4)
    asked = [request(str(i), 9 + i, i, max_tokens=8 + 6 * i, ignore_eos=True) for i in range(3)]
    ran = run(engine, *asked)
    kept = engine.prefiller.prefixes._entries
    assert len(kept) == 3
    texts = [[*prompt(9 + i, i), *ran[str(i)].tokens][:-1] for i in range(3)]
    for prefix in kept:
        assert prefix.tokens in texts
        assert_fresh(target, prefix.rows, [prefix.tokens], 1e-4 if bits is None else 0.05)
        fresh = proposer.new_row()
        alone = target.make_rows()
        _, features = target.forward(mx.array([prefix.tokens]), alone, proposer.spec.taps)
        proposer.prefill(fresh, prefix.tokens, features)
        assert prefix.draft.lengths == fresh.lengths == [len(prefix.tokens)]
        for ours, theirs in zip(prefix.draft.layers, fresh.layers, strict=True):
            for a, b in zip(visible(ours, 0)[1], visible(theirs, 0)[1], strict=True):
                assert a == pytest.approx(b, abs=1e-3 if bits is None else 0.3)


@pytest.mark.parametrize("kind", MODELS)
def test_every_layer_is_trimmed_by_exactly_what_was_rejected(kind: str) -> None:
    target = toy_target(kind)
    own = plain_text(kind, tuple(prompt(12)), 48)
    proposer = ScriptProposer([[*prompt(12), *own]], 6, 0.3)
    engine = make_engine(target, [proposer], policy="fixed")
    engine.submit(request(max_tokens=48, ignore_eos=True))
    trimmed = []
    while engine.active:
        events = engine.step()
        step = next((e for e in events if hasattr(e, "rows")), None)
        if step is None or engine.batch.rows is None:
            continue
        row = step.rows[0]
        # [anchor, drafts] went in; the anchor and the accepted drafts stay.
        for layer in engine.batch.rows.layers:
            assert layer.lengths[0] == row.position + row.accepted
            held = layer.parts[0].shape[2]
            assert held >= layer.lengths[0] - layer.start[0]
        trimmed.append(row.scheduled - row.accepted)
    assert sum(trimmed) > 0


def test_a_roll_back_that_is_not_possible_is_refused_and_changes_nothing() -> None:
    layer = RowsKV(1, window=4)
    for _ in range(300):
        layer.update_and_fetch(mx.ones((1, 1, 3, 2)), mx.ones((1, 1, 3, 2)))
        layer.trim_to(layer.lengths)
    length, start = layer.lengths[0], layer.start[0]
    assert start > 0
    for bad in (0, start, length + 1, -1):
        assert not layer.can_trim_to(0, bad)
        with pytest.raises(CacheError, match="cannot roll back"):
            layer.trim_to([bad])
        assert (layer.lengths, layer.start) == ([length], [start])
    layer.trim_to([start + 3])
    assert layer.lengths == [start + 3]


# -- caches that only move forward ------------------------------------------------------------


def test_recurrent_caches_are_named_and_refused_for_drafting() -> None:
    target = Target(hybrid_toy())
    target.check()
    assert target.rollback == "none" and target.factory.cannot_roll_back == ("ArraysCache",)
    for proposer in (LookupProposer(), ScriptProposer([], 3)):
        with pytest.raises(CacheError, match="ArraysCache"):
            make_engine(target, [proposer])
    for method in ("dspark", "lookup"):
        with pytest.raises(DsparkError, match="ArraysCache"):
            choose_method(target, None, method, "")
        with pytest.raises(DsparkError, match="not available"):
            make_engine(target).submit(request(method=method))
    assert choose_method(target, None, "auto", "")[0] == "none"
    with pytest.raises(CacheError, match="ArraysCache"):
        Target(hybrid_toy(), kv_bits=8)


@pytest.mark.parametrize("length", [1, 2, 20])
@pytest.mark.parametrize("chunk", [1, 5, 512])
def test_recurrent_models_decode_plainly(length: int, chunk: int) -> None:
    model = hybrid_toy()
    target = Target(model)
    engine = make_engine(target, prefill_chunk=chunk)
    asked = [request(str(i), length, i, max_tokens=16, ignore_eos=True) for i in range(3)]
    ran = run(engine, *asked, later={4: ["1"]})
    for i in (0, 2):
        steps = generate_step(mx.array(prompt(length, i)), model, max_tokens=16)
        assert ran[str(i)].tokens == [token for token, _ in steps]
    assert ran["1"].reason == "cancelled"
    again = run_one(engine, request("again", length, 0, max_tokens=16, ignore_eos=True))
    assert again.tokens == ran["0"].tokens
    assert again.finished is not None and again.finished.reused_tokens == 0
