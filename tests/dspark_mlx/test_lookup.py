"""Prompt lookup: drafts what followed the longest earlier match of the text's end."""

from __future__ import annotations

import pytest
from decoding import make_engine, request, run_one, toy_target
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_mlx.draft import DraftRow
from dspark_mlx.draft.lookup import NGRAMS, LookupProposer, LookupRow
from dspark_mlx.draft.rates import AcceptanceRate, MatchRate
from dspark_mlx.request import SamplingParams


def naive(text: list[int], width: int) -> tuple[int, list[int]]:
    """By scanning the text: the longest n-gram, its last earlier place, what follows it.

    A place counts once what followed it is in the text before the last token.
    """
    for n in NGRAMS:
        if len(text) < n:
            continue
        end = text[-n:]
        for at in range(len(text) - 2, n - 1, -1):
            if text[at - n : at] == end:
                out: list[int] = []
                for k in range(at, at + width):
                    out.append((text + out)[k])
                return n, out
    return 0, []


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    split=st.integers(0, 60),
    width=st.integers(1, 9),
)
@settings(max_examples=300, deadline=None)
def test_drafts_equal_a_scan_of_the_text(text: list[int], split: int, width: int) -> None:
    proposer = LookupProposer(block=9)
    row = proposer.new_row()
    proposer.prefill(row, text[: min(split, len(text) - 1)], None)
    proposer.extend(row)
    rest = text[min(split, len(text) - 1) : -1]
    proposer.commit([rest], [0], [0])
    assert proposer.row_length(proposer.extract(0)) == len(text) - 1
    draft = proposer.propose([DraftRow(text[-1], len(text), SamplingParams(), width)])
    kind, expected = naive(text, width)
    assert draft.token_rows() == [expected]
    assert proposer._rows[0].draft(text[-1], width)[0] == kind
    rates = [proposer.match_rate.rate(kind + k) for k in range(len(expected))]
    assert draft.confidence_rows() == [pytest.approx(rates)]
    assert proposer.peek([text[-1]]) == [tuple(proposer.copy(0, text[-1], 9)[1])]
    assert draft.counts == (len(expected),) and draft.q == (None,)


@given(text=st.lists(st.integers(0, 2), min_size=2, max_size=40), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_row_rolled_back_is_a_row_that_never_went_on(
    text: list[int], data: st.DataObject
) -> None:
    proposer = LookupProposer()
    row, fresh = proposer.new_row(), proposer.new_row()
    proposer.prefill(row, text, None)
    length = data.draw(st.integers(0, len(text)))
    proposer.trim_row(row, length)
    proposer.prefill(fresh, text[:length], None)
    assert (row.tokens, row.index) == (fresh.tokens, fresh.index)


def test_a_repetition_continues_with_its_period() -> None:
    row = LookupRow()
    for token in [9, 1, 2, 3, 1, 2, 3, 1]:
        row.append(token)
    assert row.draft(2, 7) == (5, [3, 1, 2, 3, 1, 2, 3])


def test_rows_of_a_batch_keep_to_themselves() -> None:
    proposer = LookupProposer(block=4)
    for text in ([1, 2, 3, 1], [5, 6, 7, 8], [1, 2, 9, 1]):
        row = proposer.new_row()
        proposer.prefill(row, text, None)
        proposer.extend(row)
    ask = [DraftRow(2, 5, SamplingParams(), width) for width in (4, 4, 2)]
    draft = proposer.propose(ask)
    assert draft.token_rows() == [[3, 1, 2, 3], [], [9, 1]]
    assert draft.tokens.shape == draft.confidence.shape == (3, 4)
    proposer.filter([2])
    assert proposer.propose(ask[:1]).token_rows() == [[9, 1, 2, 9]]
    none = proposer.propose([DraftRow(77, 5, SamplingParams(), 4)])
    assert none.counts == (0,) and none.tokens.shape == (1, 0)
    assert proposer.propose([DraftRow(2, 5, SamplingParams(), 0)]).counts == (0,)


def test_confidence_is_the_running_acceptance_rate() -> None:
    acceptance = AcceptanceRate()
    assert acceptance.rates(2)[0] == 0.5
    for _ in range(50):
        acceptance.observe(accepted=2, verified=4)  # the third was wrong, the fourth never judged
    rates = acceptance.rates(4)
    assert rates[0] > 0.9 and rates[1] > 0.9 and rates[2] < 0.1
    assert rates[3] == rates[2]  # never judged: taken to be like the one before it
    for _ in range(50):
        acceptance.observe(accepted=0, verified=4)
    assert acceptance.rates(1)[0] < 0.3


def test_the_longer_the_match_the_likelier_it_goes_on() -> None:
    rates = MatchRate()
    assert rates.rate(2) == pytest.approx(2 / 3) and rates.rate(12) == pytest.approx(12 / 13)
    assert rates.rate(7) == rates.rate(5) and rates.rate(40) == rates.rate(12)
    for _ in range(60):
        rates.observe(7, hit=False)
    assert rates.rate(5) < 0.1 and rates.rate(4) == pytest.approx(4 / 5)
    for _ in range(60):
        rates.observe(5, hit=True)
    assert rates.rate(7) > 0.8


def test_every_token_of_a_reply_says_how_much_matches_are_worth() -> None:
    proposer = LookupProposer(4)
    row = proposer.new_row()
    proposer.prefill(row, [1, 2, 3, 4, 1, 2], None)
    proposer.extend(row)
    before = proposer.match_rate.rate(2), proposer.match_rate.rate(3)
    proposer.commit([[3, 9]], [0], [0])  # behind 1 2 comes 3 again; behind 1 2 3 not 4
    assert proposer.match_rate.rate(2) > before[0] and proposer.match_rate.rate(3) < before[1]


def test_confidence_rises_where_a_reply_copies() -> None:
    proposer = LookupProposer(4)
    row = proposer.new_row()
    text = [1, 2, 3, 4, 5, 6, 7] * 12
    proposer.prefill(row, text[:20], None)
    proposer.extend(row)
    seen = []
    for at in range(20, 70, 5):
        draft = proposer.propose([DraftRow(text[at], at + 1, SamplingParams(), 4)])
        assert draft.token_rows() == [text[at + 1 : at + 5]]
        seen.append(draft.confidence_rows()[0][0])
        proposer.commit([text[at : at + 5]], [4], [4])
    assert seen == sorted(seen) and seen[0] < 0.93 < 0.97 < seen[-1]


def test_a_target_that_repeats_itself_takes_fewer_rounds() -> None:
    target = toy_target("qwen3")
    ask = request(max_tokens=96, ignore_eos=True)
    done = run_one(make_engine(target, [LookupProposer(6)], pipelined=False), ask).finished
    assert done is not None
    assert done.accepted > 30 and done.rounds == 96 - done.accepted


@pytest.mark.parametrize("block", [1, 8, 32])
def test_a_draft_is_never_longer_than_the_block_or_what_may_follow(block: int) -> None:
    target = toy_target("qwen3")
    ran = run_one(
        make_engine(target, [LookupProposer(block)]), request(max_tokens=40, ignore_eos=True)
    )
    left = 40
    for row in ran.rounds:
        assert len(row.drafted) <= min(block, left - 1)
        left -= len(row.tokens)
    assert left == 0
