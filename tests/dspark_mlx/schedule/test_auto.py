"""Auto: lengths within caps, reasons that match their numbers, bounded loss, nothing kept."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_mlx.bench.simulator.reply_trace import ReplyTrace
from dspark_mlx.bench.simulator.simulate import fixed_length, simulate
from dspark_mlx.bench.simulator.tables import tables
from dspark_mlx.request import Cuts
from dspark_mlx.schedule import Auto, CostModel, EarlyStop, Lagged
from dspark_mlx.schedule.auto import CREDIT, SHARE, Regret
from dspark_mlx.schedule.policy import Outcome, RowView

MORE = re.compile(r"verifying (\d+) more would cost (-?[\d.]+) ms for ([\d.]+) expected tokens")


def view(
    name="r", block=7, remaining=500, schedule_invariant=True, cuts=None, method="dspark", context=0
):
    return RowView(
        name, method, block, remaining, context, schedule_invariant, True, cuts or Cuts()
    )


def play(policy, rows, confidence, accepted, drafted=None, seconds=0.05):
    """One round; returns its plan and schedule."""
    plan = policy.plan(rows)
    drafted = tuple(plan.widths if drafted is None else map(min, plan.widths, drafted))
    given_c = [c[:n] for c, n in zip(confidence, drafted, strict=True)]
    made = policy.schedule(
        rows, drafted, given_c if plan.needs_confidence and any(drafted) else None
    )
    took = tuple(min(a, n) for a, n in zip(accepted, made.lengths, strict=True))
    policy.observe(
        Outcome(
            tuple(rows), drafted, made.lengths, took, tuple(a + 1 for a in took),
            tuple(map(tuple, given_c)), 0.003 if plan.needs_confidence else 0.0, seconds,
            made.predicted_seconds or seconds,
        )
    )  # fmt: skip
    return plan, made


ROWS = st.lists(
    st.builds(
        view,
        name=st.uuids().map(str),
        block=st.integers(0, 9),
        remaining=st.integers(1, 30),
        schedule_invariant=st.booleans(),
        method=st.sampled_from(["dspark", "lookup"]),
        context=st.integers(0, 9000),
        cuts=st.builds(
            Cuts,
            draft_length=st.none() | st.integers(0, 9),
            p_min=st.sampled_from([0.0, 0.5]),
        ),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda row: row.request_id,
)


@settings(max_examples=60, deadline=None)
@given(
    ROWS,
    st.sampled_from([*sorted(tables()), None]),
    st.sampled_from([Auto, EarlyStop, Lagged]),
    st.data(),
)
def test_lengths_stay_within_caps_and_every_row_has_a_reason(rows, table, make, data):
    policy = make(tables()[table] if table else None)
    for _ in range(data.draw(st.integers(1, 12))):
        confidence = [data.draw(st.lists(st.floats(0, 1), min_size=9, max_size=9)) for _ in rows]
        there = [data.draw(st.integers(0, 9)) for _ in rows]
        accepted = [data.draw(st.integers(0, 9)) for _ in rows]
        plan, made = play(policy, rows, confidence, accepted, there)
        for r, row in enumerate(rows):
            assert 0 <= plan.widths[r] <= row.cap
            assert 0 <= made.lengths[r] <= min(plan.widths[r], there[r])
            assert made.reasons[r]
            if made.curves:
                assert len(made.curves[r]) > made.lengths[r]
                assert np.all(np.isfinite(made.curves[r]))
            if plan.needs_confidence and row.cuts.p_min:
                assert all(c >= row.cuts.p_min for c in confidence[r][: made.lengths[r]])


def test_a_trimmed_row_s_reason_has_the_numbers_of_the_decision():
    cost = CostModel({0: {1: {w: 0.01 * w for w in range(1, 9)}}}, {"dspark": {1: {7: 0.001}}})
    policy = EarlyStop(cost)
    rows = (view(),)
    confidence = [[0.95, 0.9, 0.3, 0.2, 0.1, 0.1, 0.1]]
    policy.plan(rows)
    made = policy.schedule(rows, (7,), confidence)
    survival = np.cumprod(confidence[0])
    (length,) = made.lengths
    more, cost_ms, won = MORE.fullmatch(made.reasons[0]).groups()
    assert int(more) == 7 - length > 0
    assert float(cost_ms) == pytest.approx(10.0 * (7 - length), abs=0.06)
    assert float(won) == pytest.approx(survival[length:].sum(), abs=0.006)
    seconds = 0.001 + 0.01 * (length + 1)
    assert made.predicted_seconds == pytest.approx(seconds)
    assert made.predicted_tps == pytest.approx((1 + survival[:length].sum()) / seconds)
    assert made.curves[0][length] == pytest.approx(made.predicted_tps)


def test_reasons_of_auto_match_the_curve():
    """The tokens and time a reason names lead to the curve's end from the chosen point."""
    rng = np.random.default_rng(0)
    policy, rows, trimmed = Auto(tables()["m4-pro-quantised"]), (view(),), 0
    for _ in range(200):
        c = np.full(7, 0.97 if rng.random() < 0.5 else 0.4).tolist()
        accepted = int(np.cumprod(rng.random(7) < c).sum())
        _, made = play(policy, rows, [c], [accepted])
        found = MORE.fullmatch(made.reasons[0])
        if found and made.policy == "optimum":
            trimmed += 1
            _, ms, won = map(float, found.groups())
            long = made.curves[0][-1]
            tokens = made.predicted_tps * made.predicted_seconds
            assert long == pytest.approx(
                (tokens + won) / (made.predicted_seconds + ms / 1e3), rel=0.02
            )
    assert trimmed > 20


@pytest.mark.parametrize("table", sorted(tables()))
@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_drafter_that_lies_costs_at_most_two_percent(table, concurrency):
    """Sure of itself and always wrong, from the first round on."""
    text = [ReplyTrace("lies", np.full((300, 7), 0.95), (0,) * 300) for _ in range(2 * concurrency)]
    plain = fixed_length(0, text, tables()[table], concurrency)
    auto = simulate(Auto(tables()[table]), text, tables()[table], concurrency=concurrency)
    assert auto.tps >= 0.98 * plain.tps


def test_a_lookup_that_seldom_finds_anything_is_not_charged_for_what_it_did_not_draft():
    policy, rng = Auto(tables()["cpu-2-cores"]), np.random.default_rng(1)
    rows, drafted = (view(method="lookup"),), []
    for _ in range(300):
        found = 7 if rng.random() < 0.15 else 0
        plan, _ = play(policy, rows, [[0.9] * 7], [6], (found,))
        drafted.append(plan.widths[0])
    assert np.mean(np.array(drafted[20:]) > 0) > 0.95


def test_auto_says_which_rule_it_used_and_uses_the_optimum_only_where_it_is_lossless():
    rng = np.random.default_rng(0)
    for schedule_invariant, rule in ((True, "optimum"), (False, "early-stop")):
        policy, seen = Auto(tables()["m4-pro-quantised"]), set()
        for _ in range(150):
            c = rng.beta(3, 1, 7).tolist()
            accepted = int(np.cumprod(rng.random(7) < c).sum())
            _, made = play(policy, (view(schedule_invariant=schedule_invariant),), [c], [accepted])
            seen.add(made.policy)
        assert rule in seen and seen <= {rule, "settled", "plain", "explore"}


def test_one_row_that_must_not_anticipate_binds_the_batch():
    policy, rng = Auto(tables()["m4-pro-quantised"]), np.random.default_rng(0)
    rows = (view("a"), view("b", schedule_invariant=False))
    for _ in range(80):
        c = rng.beta(3, 1, (2, 7))
        accepted = np.cumprod(rng.random((2, 7)) < c, axis=1).sum(axis=1).tolist()
        _, made = play(policy, rows, c.tolist(), accepted)
        assert made.policy != "optimum"


def test_an_empty_batch_and_rows_without_a_proposer_are_plain():
    policy = Auto(tables()["flat"])
    assert policy.plan(()).widths == ()
    plan, made = play(policy, (view(block=0), view("s", remaining=1)), [[], []], [0, 0])
    assert plan.widths == made.lengths == (0, 0) and not plan.needs_confidence


# -- the bound on what may be lost -------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0.02, 0.5), st.integers(1, 8)), max_size=300))
def test_regret_is_bounded(rounds):
    """Whatever drafting brings, what it loses stays within share, credit and one round."""
    regret, plain, lost, total, worst = Regret(), 0.05, 0.0, 0.0, 0.0
    for seconds, tokens in rounds:
        if regret.affords(0.0, plain):
            won = tokens * plain - seconds
            regret.observe(seconds, won)
            lost = max(lost - won, 0.0)
            total += seconds
        else:
            regret.observe(plain, 0.0)
            total += plain
        worst = max(worst, lost - SHARE * total)
    assert worst <= CREDIT * plain + 0.5


def test_drafting_is_taken_up_again_only_for_a_clear_difference():
    """Once plain, the best way to draft must beat plain decoding by the margin."""
    cost = CostModel({0: {1: {1: 0.1, 2: 0.15}}}, {"dspark": {1: {1: 0.001}}})
    policy, rows = Auto(cost), (view(block=1),)
    for _ in range(60):
        play(policy, rows, [[0.3]], [0])
    assert not any(policy.plan(rows).widths) and not policy._drafting


@pytest.mark.parametrize("table", ["linear", "m4-pro-quantised"])
def test_explorations_grow_rare_and_new_rows_bring_them_back(table):
    policy, explored = Auto(tables()[table]), []
    for i in range(700):
        _, made = play(policy, (view("a"),), [[0.02] * 7], [0])
        if made.policy == "explore":
            explored.append(i)
    gaps = np.diff(explored)
    assert len(explored) >= 3 and (gaps[1:] >= gaps[:-1]).all()
    again = [play(policy, (view("b"),), [[0.02] * 7], [0])[1].policy for _ in range(40)]
    assert "explore" in again


def test_plain_rounds_that_overlap_are_priced_as_they_run() -> None:
    """Each is dispatched before the last was read, so the host's work between them is hidden."""
    step, draft = {0: {1: {1: 0.1, 2: 0.11}}}, {"dspark": {1: {1: 0.01}}}
    # 1.35 tokens in 0.12 s: better than one in 0.1 s, worse than one in 0.08 s.
    accepts = tuple(int(hit) for hit in np.random.default_rng(3).random(600) < 0.35)
    text = ReplyTrace("text", np.full((600, 1), 0.35), accepts)
    for overlap, drafts in ((0.0, True), (0.02, False)):
        cost = CostModel(step, draft, overlap=overlap)
        run = simulate(Auto(cost), [text], cost)
        plain, drafted = (fixed_length(n, [text], cost).tps for n in (0, 1))
        assert bool(drafted > plain) is drafts
        assert run.tps > 0.98 * max(plain, drafted)
        assert bool(np.mean(run.widths) > 0.5) is drafts


def test_a_plan_that_is_not_followed_changes_nothing() -> None:
    """The engine may ask once and run several plain rounds: state moves in ``observe``."""
    policy = Auto(tables()["cpu-2-cores"])
    rows = (view(),)
    for _ in range(20):
        play(policy, rows, [[0.9] * 7], [5])
    assert len({policy.plan(rows) for _ in range(5)}) == 1
