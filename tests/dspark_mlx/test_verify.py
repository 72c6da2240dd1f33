"""verify: (draft, logits) to a verdict, for every kind of row, alone and side by side."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_mlx.model.sampling import choose
from dspark_mlx.model.verify import RowSpec, verify
from dspark_mlx.request import SamplingParams

V = 9
GREEDY = SamplingParams()


def logits_for(choices: list[list[int]], noise: int = 0) -> mx.array:
    """Logits ``(B, W, V)`` whose largest entries are ``choices``."""
    rng = np.random.default_rng(noise)
    values = rng.normal(0, 1, (len(choices), len(choices[0]), V))
    for r, row in enumerate(choices):
        for k, token in enumerate(row):
            values[r, k, token] += 20
    return mx.array(values.astype(np.float32))


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_draft_stands_while_it_is_what_the_target_chose(data: st.DataObject) -> None:
    draw = data.draw
    rows, width = draw(st.integers(1, 4)), draw(st.integers(0, 6))
    ids = st.integers(0, V - 1)
    row = st.lists(ids, min_size=width + 1, max_size=width + 1)
    choices = draw(st.lists(row, min_size=rows, max_size=rows))
    draft = [[c if draw(st.booleans()) else draw(ids) for c in r] for r in choices]
    lengths = [draw(st.integers(0, width)) for _ in range(rows)]
    verdict = verify(mx.array(draft), logits_for(choices), [RowSpec(GREEDY, 5, n) for n in lengths])
    for r in range(rows):
        stood = 0
        while stood < lengths[r] and draft[r][stood] == choices[r][stood]:
            stood += 1
        assert verdict.accepted[r].item() == stood
        assert verdict.token[r].item() == choices[r][stood]


def test_without_a_draft_the_first_choice_is_the_token() -> None:
    for draft in (None, mx.zeros((2, 0), dtype=mx.int32)):
        verdict = verify(draft, logits_for([[3], [4]]), [RowSpec(GREEDY, 5, 0)] * 2)
        assert verdict.accepted.tolist() == [0, 0] and verdict.token.tolist() == [3, 4]


@given(seed=st.integers(0, 2**32 - 1), lengths=st.lists(st.integers(0, 4), min_size=5, max_size=5))
@settings(max_examples=60, deadline=None)
def test_rows_of_all_kinds_side_by_side_equal_each_alone(seed: int, lengths: list[int]) -> None:
    rng = np.random.default_rng(seed)
    logits = mx.array(rng.normal(0, 2, (5, 5, V)).astype(np.float32))
    draft = mx.array(rng.integers(0, V, (5, 4)))
    q = mx.softmax(mx.array(rng.normal(0, 1, (4, V)).astype(np.float32)), axis=-1)
    warm = SamplingParams(temperature=0.8, top_p=0.95, seed=seed)

    def halve(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, tokens].multiply(0.5)

    specs = [
        RowSpec(GREEDY, 11, lengths[0]),
        RowSpec(warm, 12, lengths[1]),
        RowSpec(warm, 13, lengths[2], q=q),
        RowSpec(GREEDY, 14, lengths[3], processors=(halve,), history=(1, 2, 3)),
        RowSpec(GREEDY, 15, lengths[4], sampler=lambda p: mx.argmin(p, axis=-1)),
    ]
    together = verify(draft, logits, specs)
    for r, spec in enumerate(specs):
        alone = verify(draft[r : r + 1], logits[r : r + 1], [spec])
        assert alone.accepted.tolist() == [together.accepted[r].item()]
        assert alone.token.tolist() == [together.token[r].item()]
        n = together.accepted[r].item()
        assert 0 <= n <= lengths[r]
        narrow = verify(draft[r : r + 1, : lengths[r]], logits[r : r + 1, : lengths[r] + 1], [spec])
        assert narrow.accepted.tolist() == [n], "what is behind the cut was used"
        assert narrow.token.tolist() == [together.token[r].item()]


@pytest.mark.parametrize("length", range(5))
def test_a_coupled_row_chooses_as_it_would_without_a_draft(length: int) -> None:
    logits = mx.random.normal((1, 5, V), key=mx.random.key(3))
    params = SamplingParams(temperature=1.3, seed=77)
    own = choose(logits[0], params, range(20, 25)).tolist()
    verdict = verify(mx.array([own[:4]]), logits, [RowSpec(params, 20, length)])
    assert (verdict.accepted.item(), verdict.token.item()) == (length, own[length])
    # and each position chooses as it would alone
    for k in range(5):
        assert choose(logits[0, k : k + 1], params, range(20 + k, 21 + k)).tolist() == [own[k]]


def test_an_impossible_draft_is_rejected_and_never_returned() -> None:
    """p(x) = 0: a token the filters removed, or one outside a top-k of one."""
    params = [SamplingParams(temperature=1.0, top_k=1, seed=i) for i in range(40)]
    logits = mx.concatenate([logits_for([[2, 5, 1]])] * 40)
    q = mx.full((2, V), 1 / V)
    rows = [RowSpec(p, 8, 2, q=q) for p in params]
    verdict = verify(mx.array([[2, 3]] * 40), logits, rows)
    assert verdict.accepted.tolist() == [1] * 40 and verdict.token.tolist() == [5] * 40


def test_a_draft_from_the_targets_own_law_always_stands() -> None:
    params = SamplingParams(temperature=0.7, seed=5)
    logits = mx.random.normal((1, 4, V), key=mx.random.key(1))
    p = mx.softmax(logits[0, :3] / 0.7, axis=-1)
    for x in range(V):
        verdict = verify(mx.array([[x] * 3]), logits, [RowSpec(params, 3, 3, q=p)])
        assert verdict.accepted.item() == 3


def test_processors_see_the_history_and_the_drafted_tokens_before_their_position() -> None:
    seen: list[list[int]] = []

    def watch(tokens: mx.array, logits: mx.array) -> mx.array:
        assert logits.shape == (1, V)
        seen.append(tokens.tolist())
        return logits

    spec = RowSpec(GREEDY, 3, 2, processors=(watch,), history=(7, 8, 6))
    verify(mx.array([[1, 2]]), logits_for([[1, 2, 3]]), [spec])
    assert seen == [[7, 8, 6], [7, 8, 6, 1], [7, 8, 6, 1, 2]]


def test_processors_run_in_order_and_change_what_is_chosen_and_reported() -> None:
    def add(amount: float) -> Any:
        return lambda tokens, logits: logits.at[:, 4].add(amount)

    spec = RowSpec(GREEDY, 0, 1, processors=(add(10.0), add(20.0)), history=())
    logits = logits_for([[1, 4]])
    verdict = verify(mx.array([[4]]), logits, [spec])
    assert (verdict.accepted.item(), verdict.token.item()) == (1, 4)
    assert np.array(verdict.logits - logits)[0, :, 4] == pytest.approx([30.0, 30.0])
    assert verify(mx.array([[4]]), logits, [RowSpec(GREEDY, 0, 1)]).accepted.item() == 0


def test_samplers_get_log_probabilities_one_position_at_a_time() -> None:
    def sampler(logprobs: mx.array) -> mx.array:
        assert logprobs.shape == (1, V)
        assert mx.exp(logprobs).sum().item() == pytest.approx(1.0, abs=1e-5)
        return mx.argmax(logprobs, axis=-1)

    spec = RowSpec(SamplingParams(temperature=5.0), 0, 2, sampler=sampler)
    verdict = verify(mx.array([[6, 1]]), logits_for([[6, 2, 3]]), [spec])
    assert (verdict.accepted.item(), verdict.token.item()) == (1, 2)


def test_half_precision_logits_are_compared_as_they_are() -> None:
    logits = logits_for([[3, 4]]).astype(mx.bfloat16)
    verdict = verify(mx.array([[3]]), logits, [RowSpec(GREEDY, 0, 1)])
    assert (verdict.accepted.item(), verdict.token.item()) == (1, 4)
    assert verdict.logits.dtype == mx.bfloat16


def test_a_draft_without_a_law_is_never_accepted() -> None:
    """q of a drafter with damaged weights: the token is then drawn from p itself."""
    warm = SamplingParams(temperature=1.0, seed=3, draft_sampling="probabilistic")
    rng = mx.random.normal((1, 3, 20), key=mx.random.key(1))
    q = mx.full((2, 20), float("nan"))
    drawn = []
    for seed in range(300):
        row = RowSpec(dataclasses.replace(warm, seed=seed), 4, 2, q=q)
        verdict = verify(mx.array([[7, 9]]), rng, [row])
        assert verdict.accepted.tolist() == [0]
        drawn += verdict.token.tolist()
    p = np.array(mx.softmax(rng[0, 0]))
    assert np.abs(np.bincount(drawn, minlength=20) / 300 - p).sum() < 0.35
