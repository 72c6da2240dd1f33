"""lossless_greedy: whatever drafts, cuts, schedules or caches, the text is the target's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from decoding import (
    HEADS,
    ScriptProposer,
    Whims,
    dspark,
    make_engine,
    plain_text,
    request,
    run_one,
    toy_target,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import MODELS, OracleProposer, prompt

from dspark_mlx.draft.lookup import LookupProposer
from dspark_mlx.model import cache
from dspark_mlx.request import Cuts, Request
from dspark_mlx.schedule import POLICIES

COUNT = 32


def own_text(kind: str, seed: int = 0, length: int = 12, count: int = COUNT) -> list[int]:
    """What mlx-lm generates, on its own cache."""
    return list(plain_text(kind, tuple(prompt(length, seed)), count))


def ask(**options: Any) -> Request:
    return request(**({"max_tokens": COUNT, "ignore_eos": True} | options))


def scripted(kind: str, block: int, noise: float, seed: int = 0, length: int = 12) -> Any:
    script = [*prompt(length, seed), *own_text(kind, seed, length, 2 * COUNT)]
    return ScriptProposer([script], block, noise, seed=block)


@pytest.mark.parametrize("block", range(1, 9))
@pytest.mark.parametrize("kind", MODELS)
def test_every_block_size_and_proposer(kind: str, block: int) -> None:
    target = toy_target(kind)
    own = own_text(kind)
    lesson = [*prompt(12), *own]
    proposers = [
        *(scripted(kind, block, noise) for noise in (0.0, 0.3, 1.0)),
        LookupProposer(block),
        dspark(target, block=block, lessons=[lesson]),
    ]
    for proposer in proposers:
        ran = run_one(make_engine(target, [proposer]), ask())
        assert ran.tokens == own, proposer.spec.name
        assert {row.method for row in ran.rounds} == {proposer.spec.name}
    perfect = run_one(make_engine(target, proposers[:1]), ask()).finished
    assert perfect is not None and perfect.accepted == perfect.scheduled
    assert perfect.rounds == -(-len(own) // (block + 1))


@pytest.mark.slow
@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_every_drafter_head_and_vocabulary(kind: str, head: str | None, reduced: bool) -> None:
    target = toy_target(kind)
    own = own_text(kind)
    for taps, confidence, calibrated in (((-1, 0, 1), True, True), ((1,), False, False)):
        proposer = dspark(
            target,
            head=head,
            reduced=reduced,
            taps=taps,
            confidence=confidence,
            calibrated=calibrated,
            lessons=[[*prompt(12), *own]],
        )
        ran = run_one(make_engine(target, [proposer]), ask())
        assert ran.tokens == own
        assert ran.finished is not None and ran.finished.scheduled > 0
        if head is not None:  # it was taught most of this text
            assert 0 < ran.finished.accepted < ran.finished.scheduled


@pytest.mark.parametrize("kind", MODELS)
def test_every_decode_length_from_zero_to_the_block(kind: str) -> None:
    target = toy_target(kind)
    own = own_text(kind)
    proposer = dspark(target, block=7, lessons=[[*prompt(12), *own]])
    for length in range(8):
        ran = run_one(make_engine(target, [proposer]), ask(cuts=Cuts(draft_length=length)))
        assert ran.tokens == own
        assert max(row.scheduled for row in ran.rounds) == min(length, 7)


@pytest.mark.parametrize(
    "cuts",
    [Cuts(p_min=0.5), Cuts(p_survival_min=0.3), Cuts(draft_length=3, p_min=0.1), Cuts(p_min=1.0)],
    ids=str,
)
@pytest.mark.parametrize("method", ["dspark", "script", "lookup"])
def test_static_cuts_shorten_rounds_and_change_no_text(method: str, cuts: Cuts) -> None:
    target = toy_target("llama")
    own = own_text("llama")
    proposer: Any = {
        "dspark": lambda: dspark(target, lessons=[[*prompt(12), *own]]),
        "script": lambda: scripted("llama", 6, 0.4),
        "lookup": lambda: LookupProposer(6),
    }[method]()
    ran = run_one(make_engine(target, [proposer], policy="threshold"), ask(cuts=cuts))
    assert ran.tokens == own
    for row in ran.rounds:
        assert all(c >= cuts.p_min for c in row.confidence[: row.scheduled])
        assert all(s >= cuts.p_survival_min for s in row.survival[: row.scheduled])
        if cuts.draft_length is not None:
            assert row.scheduled <= cuts.draft_length


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_every_policy(kind: str, name: str) -> None:
    target = toy_target(kind)
    own = own_text(kind)
    for proposer in (scripted(kind, 6, 0.3), dspark(target, lessons=[[*prompt(12), *own]])):
        ran = run_one(make_engine(target, [proposer], policy=name), ask())
        assert ran.tokens == own


@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(list(MODELS)),
    method=st.sampled_from(["dspark", "script", "lookup"]),
)
@settings(max_examples=15, deadline=None)
def test_schedules_that_come_and_go_at_random(seed: int, kind: str, method: str) -> None:
    """Speculation switched off and on within a reply leaves no stale drafter state behind."""
    target = toy_target(kind)
    own = own_text(kind)
    proposer: Any = {
        "dspark": lambda: dspark(target, block=6, lessons=[[*prompt(12), *own]]),
        "script": lambda: scripted(kind, 6, 0.3),
        "lookup": lambda: LookupProposer(6),
    }[method]()
    engine = make_engine(target, [proposer], policy=Whims(seed), prefill_chunk=1 + seed % 13)
    ran = run_one(engine, ask())
    assert ran.tokens == own


@pytest.mark.parametrize("kind", ["llama-window", "gemma3"])
@pytest.mark.parametrize("method", ["script", "dspark", "none"])
def test_long_texts_on_sliding_windows(kind: str, method: str) -> None:
    """Beyond the window and all that is kept behind it, so that old positions are dropped."""
    length, count = 500, 2 * COUNT
    target = toy_target(kind)
    own = own_text(kind, 0, length, count)
    proposers: list[Any] = {
        "script": [scripted(kind, 7, 0.1, length=length)],
        "dspark": [dspark(target, block=7, lessons=[[*prompt(length), *own]])],
        "none": [],
    }[method]
    dropped = []

    def watch(engine: Any, events: Any) -> None:
        if engine.batch.rows is not None:
            dropped.append(max(layer.start[0] for layer in engine.batch.rows.layers))

    engine = make_engine(target, proposers, prefill_chunk=256)
    ran = run_one(engine, ask(length=length, max_tokens=count), each=watch)
    assert ran.tokens == own
    assert dropped[0] == 0 < dropped[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("chunk", [1, 7, 64, 300])
def test_long_prompts_in_chunks(kind: str, chunk: int) -> None:
    length = 300 if chunk > 1 else 40
    target = toy_target(kind)
    own = own_text(kind, 5, length, 16)
    for proposers in ([], [dspark(target, lessons=[[*prompt(length, 5), *own]])]):
        engine = make_engine(target, proposers, prefill_chunk=chunk)
        ran = run_one(engine, ask(length=length, seed=5, max_tokens=16))
        assert ran.tokens == own
        assert [p.done for p in ran.prefills] == [
            *range(chunk, length - 1, chunk),
            length - 1,
        ]


@pytest.mark.parametrize("block", [1, 4, 8])
@pytest.mark.parametrize("kind", ["llama-window", "gemma3"])
def test_small_buffers_that_are_shifted_all_the_time(
    kind: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "GROWTH", 8)
    monkeypatch.setattr(cache, "SLACK", 8)
    target = toy_target(kind)
    own = own_text(kind, count=2 * COUNT)
    for proposer in (
        scripted(kind, block, 0.2),
        dspark(target, block=block, lessons=[[*prompt(12), *own]]),
    ):
        ran = run_one(make_engine(target, [proposer]), ask(max_tokens=2 * COUNT))
        assert ran.tokens == own


def test_drafts_that_are_always_right_and_always_wrong() -> None:
    """An oracle that runs the model itself, not a script."""
    target = toy_target("gemma3")
    own = own_text("gemma3")
    for noise, accepted in ((0.0, True), (1.0, False)):
        oracle = OracleProposer(target.model, 4, noise)
        done = run_one(make_engine(target, [oracle]), ask())
        assert done.tokens == own
        assert done.finished is not None
        assert done.finished.accepted == (done.finished.scheduled if accepted else 0)


# -- arithmetic that depends on the width of a call: forks only at near ties ------------------


def fork(
    ours: Sequence[int], plain: Sequence[int], target: Any, tokens: Sequence[int]
) -> float | None:
    """The target's relative top-2 margin where two greedy texts part; None if they do not."""
    for at, (a, b) in enumerate(zip(ours, plain, strict=False)):
        if a != b:
            rows = target.make_rows()
            text = mx.array([[*tokens, *plain[:at]]])
            logits = target.forward(text, rows)[0][0, -1].astype(mx.float32)
            top = mx.sort(logits)[-2:].tolist()
            assert {a, b} == set(mx.argsort(logits)[-2:].tolist())
            return (top[1] - top[0]) / float(mx.abs(logits).max())
    assert len(ours) == len(plain)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_quantised_caches_fork_only_at_near_ties(
    kind: str, bits: int, record_property: Any
) -> None:
    target = toy_target(kind, kv_bits=bits)
    plain = run_one(make_engine(target), ask()).tokens
    script = [*prompt(12), *plain]
    for proposer in (
        ScriptProposer([script], 7, 0.2),
        ScriptProposer([script], 2, 0.5),
        dspark(target, lessons=[script]),
    ):
        ours = run_one(make_engine(target, [proposer]), ask()).tokens
        margin = fork(ours, plain, target, prompt(12))
        record_property("margin", margin)
        assert margin is None or margin < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_half_precision_forks_only_at_near_ties(kind: str, record_property: Any) -> None:
    target = toy_target(kind, dtype="bfloat16")
    for seed in range(2):
        asked = ask(seed=seed)
        plain = run_one(make_engine(target), asked).tokens
        script = [*prompt(12, seed), *plain]
        for proposer in (ScriptProposer([script], 7, 0.2), dspark(target, lessons=[script])):
            ours = run_one(make_engine(target, [proposer]), asked).tokens
            margin = fork(ours, plain, target, prompt(12, seed))
            record_property("margin", margin)
            assert margin is None or margin < 2**-6
