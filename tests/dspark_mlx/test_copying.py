"""A drafter that copies where the text repeats: which of the two drafts, and that neither shows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from decoding import Whims, dspark, make_engine, plain_text, request, run, run_one, toy_target
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import MODELS, prompt

from dspark_mlx.bench.simulator.reply_trace import from_trace
from dspark_mlx.bench.simulator.tables import tables
from dspark_mlx.draft import DraftRow
from dspark_mlx.draft.copying import CopyFirst
from dspark_mlx.draft.lookup import LookupProposer
from dspark_mlx.request import Request, SamplingParams
from dspark_mlx.schedule import Plan, make_policy
from dspark_mlx.schedule.cost import CostModel
from dspark_mlx.schedule.policy import RowView

COUNT = 40


def copying(kind: str = "llama", block: int = 4, copy: int = 6, **options: Any) -> CopyFirst:
    return CopyFirst(dspark(toy_target(kind), block=block, **options), copy)


def repeated(length: int = 9, times: int = 2, seed: int = 0) -> tuple[int, ...]:
    return tuple(prompt(length, seed)) * times


def row(anchor: int, width: int) -> DraftRow:
    return DraftRow(anchor, 1, SamplingParams(), width)


def features(proposer: CopyFirst, count: int) -> mx.array:
    return mx.zeros((1, count, len(proposer.spec.taps) * toy_target("llama").hidden_size))


def seated(*texts: tuple[int, ...]) -> CopyFirst:
    """A proposer whose rows hold these texts but for their last tokens."""
    proposer = copying(block=4, copy=6)
    for text in texts:
        state = proposer.new_row()
        proposer.prefill(state, text[:-1], features(proposer, len(text) - 1))
        proposer.extend(state)
    return proposer


# -- which of the two -----------------------------------------------------------------------


def test_copies_only_what_was_foreseen_and_drafts_the_rest() -> None:
    proposer = copying(block=3, copy=6)
    target = toy_target("llama")
    engine = make_engine(target, [proposer], policy="fixed", max_rows=2)
    seen = {"copied": 0, "drafted": 0, "both": 0}

    def each(engine: Any, events: Any) -> None:
        for event in events:
            for done in getattr(event, "rows", ()):
                seen["copied" if done.copied else "drafted"] += 1
                assert len(done.drafted) <= (6 if done.copied else 3)
                assert not (done.copied and done.calibrated)
            kinds = {done.copied for done in getattr(event, "rows", ())}
            seen["both"] += len(kinds) == 2

    asked = [
        request(str(i), tokens=tuple(prompt(7, seed=i)), max_tokens=COUNT, ignore_eos=True)
        for i in range(6)
    ]
    run(engine, *asked, each=each)
    assert all(seen.values()), seen


def test_a_round_whose_rows_all_copy_never_asks_the_drafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proposer = copying(copy=5)
    engine = make_engine(toy_target("llama"), [proposer], policy="fixed")
    calls: list[int] = []
    draft = proposer.inner.propose
    monkeypatch.setattr(
        proposer.inner, "propose", lambda rows: calls.append(len(rows)) or draft(rows)
    )
    ran = run_one(engine, request(tokens=repeated(), max_tokens=COUNT, ignore_eos=True))
    drafted = [done for done in ran.rounds if done.drafted and not done.copied]
    assert len(calls) == len(drafted) < len(ran.rounds)


def test_the_drafter_is_preferred_where_it_has_been_winning_more() -> None:
    proposer = copying(block=4, copy=4)
    row_state = proposer.new_row()
    proposer._lookup.prefill(row_state.text, [5, 1, 2, 9, 9, 5, 1], None)
    proposer._lookup.extend(row_state.text)
    (found,) = proposer.peek([2])  # behind a match of three
    assert found is not None and len(found) == 4
    for _ in range(40):
        proposer._acceptance.observe(4, 4)  # every draft stood whole
    assert proposer.peek([2]) == [None]
    for _ in range(40):
        proposer._acceptance.observe(0, 4)
    assert proposer.peek([2]) == [found]


def test_a_draft_asked_for_without_a_forecast_is_the_drafters() -> None:
    """As the profile asks: prices must be those of drafting."""
    proposer = seated(repeated())
    anchor = repeated()[-1]
    draft = proposer.propose([row(anchor, 4)])
    assert draft.peaks is not None and draft.counts == (4,)
    (chances,) = proposer.peek([anchor])
    assert chances is not None
    copy = proposer.propose([row(anchor, 4)])
    assert copy.peaks is None and copy.q == (None,)
    assert copy.token_rows() == [list(repeated()[:4])]
    assert copy.confidence_rows() == [pytest.approx(chances[:4])]
    again = proposer.propose([row(anchor, 4)])  # a forecast holds for one round
    assert again.peaks is not None and again.token_rows() == draft.token_rows()


def test_what_a_copy_got_right_says_nothing_of_the_drafter() -> None:
    proposer = seated(repeated())
    before = proposer._acceptance.rates(4)
    proposer.peek([repeated()[-1]])
    proposer.propose([row(repeated()[-1], 4)])
    proposer.append_features(features(proposer, 5))
    proposer.commit([[repeated()[-1], *repeated()[:4]]], [4], [4])
    assert proposer._acceptance.rates(4) == before


def test_a_drafter_that_was_verified_short_is_not_doubted_beyond() -> None:
    """Slots that no round reached are taken to be like those before them."""
    hits = copying(block=4)._acceptance
    for _ in range(40):
        hits.observe(2, 2)
    rates = hits.rates(4)
    assert rates[0] > 0.95 and rates[3] == pytest.approx(rates[1])


@pytest.mark.parametrize("method", ["dspark", "lookup"])
@pytest.mark.parametrize("policy", ["auto", "lagged", "early-stop"])
def test_text_that_repeats_from_the_start_needs_no_profile(policy: str, method: str) -> None:
    proposer = copying() if method == "dspark" else LookupProposer(6)
    engine = make_engine(toy_target("llama"), [proposer], policy=policy)
    ran = run_one(engine, request(tokens=repeated(), max_tokens=COUNT, ignore_eos=True))
    assert ran.tokens == list(plain_text("llama", repeated(), COUNT))
    assert any(done.drafted for done in ran.rounds)


def test_rows_that_want_nothing_neither_copy_nor_draft() -> None:
    proposer = seated(repeated())
    proposer.peek([repeated()[-1]])
    assert proposer.propose([row(repeated()[-1], 0)]).counts == (0,)


# -- nothing of it shows in the text ----------------------------------------------------------


@pytest.mark.parametrize("policy", ["auto", "fixed", "lagged", "early-stop", "threshold", "off"])
@pytest.mark.parametrize("kind", MODELS)
def test_lossless_greedy(kind: str, policy: str) -> None:
    target = toy_target(kind)
    tokens = repeated(6, 3)
    own = list(plain_text(kind, tokens, COUNT))
    cost = None if policy in ("fixed", "threshold", "off") else tables()["cpu-2-cores"]
    made = make_policy(policy) if cost is None else make_policy(policy, cost=cost)
    engine = make_engine(target, [copying(kind)], policy=made)
    ran = run_one(engine, request(tokens=tokens, max_tokens=COUNT, ignore_eos=True))
    assert ran.tokens == own


@pytest.mark.slow
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_rows_come_go_and_are_taken_up_again(seed: int) -> None:
    """Ragged rows at random, some cancelled; then each conversation goes on from what was kept."""
    target = toy_target("llama")
    rng = np.random.default_rng(seed)
    engine = make_engine(
        target, [copying()], policy=Whims(seed), max_rows=3, kv_limit=1 << 30, prefill_chunk=8
    )
    asked = [
        request(
            f"r{i}",
            tokens=repeated(int(rng.integers(2, 7)), int(rng.integers(1, 4)), seed=i),
            max_tokens=int(rng.integers(5, COUNT)),
            ignore_eos=True,
        )
        for i in range(5)
    ]
    later = {int(rng.integers(1, 9)): [item] for item in asked[1:]}
    first = run(engine, asked[0], later=later)
    for item in asked:
        if item.id not in first:
            continue
        own = list(plain_text("llama", item.tokens or (), item.max_tokens))
        assert first[item.id].tokens == own
        longer = (*(item.tokens or ()), *own, *prompt(3, seed=seed))
        again = request("again " + item.id, tokens=longer, max_tokens=12, ignore_eos=True)
        ran = run_one(engine, again)
        assert ran.prefills[0].reused > 0
        assert ran.tokens == list(plain_text("llama", longer, 12))


@pytest.mark.parametrize("draft_sampling", ["coupled", "greedy"])
def test_a_seed_gives_one_text_with_and_without_copies(draft_sampling: Any) -> None:
    target = toy_target("llama")
    hot = SamplingParams(temperature=0.8, top_k=8, seed=5, draft_sampling=draft_sampling)

    def ask() -> Request:
        return request(tokens=repeated(), max_tokens=COUNT, ignore_eos=True, sampling=hot)

    ran = run_one(make_engine(target, [copying()]), ask())
    assert any(done.copied for done in ran.rounds)
    assert ran.tokens == run_one(make_engine(target), ask()).tokens


# -- what the scheduler makes of a draft that is known -----------------------------------------


def view(name: str = "r", **options: Any) -> RowView:
    base = {
        "method": "dspark",
        "block": 5,
        "remaining": 90,
        "context": 40,
        "schedule_invariant": True,
    }
    return RowView(request_id=name, **(base | {"calibrated": True} | options))


def copied(chances: tuple[float, ...], name: str = "r") -> RowView:
    return view(name, block=len(chances), calibrated=False, known_confidence=chances)


SURE, DOUBTFUL = (0.97,) * 8, (0.2,) * 8


def test_a_sure_copy_is_verified_whole_and_a_doubtful_one_is_not() -> None:
    auto = make_policy("auto", cost=tables()["cpu-2-cores"])
    plan: Plan = auto.plan((copied(SURE),))
    assert plan.widths == (8,) and not plan.needs_confidence  # nothing to read: it is known
    schedule = auto.schedule((copied(SURE),), (8,), None)
    assert schedule.lengths == (8,)
    cost = tables()["cpu-2-cores"]
    steps = cost.steps(1, 40, 8)
    assert schedule.predicted_seconds == pytest.approx(steps[8] + cost.overhead)  # no draft in it
    assert auto.plan((copied(DOUBTFUL),)).widths[0] < 2


def test_a_draft_for_one_row_must_be_worth_it_where_the_others_copy() -> None:
    """Nothing else is saved by not drafting: the copy is verified in any case."""
    rows = (copied(SURE, "a"), view("b"))
    for draft, drafts in ((0.001, True), (0.5, False)):
        cost = CostModel(
            {0: {1: {1: 0.1, 9: 0.15}, 2: {1: 0.1, 9: 0.15}}}, {"dspark": {2: {5: draft}}}
        )
        widths = make_policy("auto", cost=cost).plan(rows).widths
        assert widths[0] == 8 and bool(widths[1]) == drafts


@pytest.mark.parametrize("cut", [{}, {"draft_length": 8}, {"p_survival_min": 0.01}], ids=str)
def test_cuts_of_the_command_line_keep_what_is_foreseen(cut: dict[str, Any]) -> None:
    auto = make_policy("auto", cost=tables()["cpu-2-cores"], **cut)
    plan = auto.plan((copied(SURE),))
    assert plan.widths == (8,)
    known = (SURE,) if plan.needs_confidence else None
    assert auto.schedule((copied(SURE),), (8,), known).policy == "copy"


def test_a_trace_is_read_without_its_copies() -> None:
    engine = make_engine(toy_target("llama"), [copying(block=3, copy=6)], policy="fixed")
    seen: list[Any] = []

    def each(engine: Any, events: Any) -> None:
        seen.extend(event for event in events if hasattr(event, "round_seconds"))

    ask = request(tokens=tuple(prompt(7)), max_tokens=COUNT, ignore_eos=True)
    ran = run_one(engine, ask, each=each)
    assert any(done.copied for done in ran.rounds)
    (script,) = from_trace(seen)
    assert script.block == 3
