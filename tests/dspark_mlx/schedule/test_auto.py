"""Auto: lengths within caps, reasons that match their numbers, bounded loss, nothing kept."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_mlx.request import Cuts
from dspark_mlx.schedule import Auto, CostModel, EarlyStop, Lagged
from dspark_mlx.schedule.auto import HOLD
from dspark_mlx.schedule.history import KEPT_ROWS, History
from dspark_mlx.schedule.honesty import Honesty
from dspark_mlx.schedule.policy import Outcome, RowView
from dspark_mlx.schedule.script import Script
from dspark_mlx.schedule.simulate import fixed_length, simulate
from dspark_mlx.schedule.skip import AHEAD, Budget, Switch, worth_drafting
from dspark_mlx.schedule.tables import tables

MORE = re.compile(r"verifying (\d+) more would cost (-?[\d.]+) ms for ([\d.]+) expected tokens")


def view(name="r", block=7, remaining=500, pathwise=True, cuts=None, method="dspark", context=0):
    return RowView(name, method, block, remaining, context, pathwise, True, cuts or Cuts())


def play(policy, rows, confidence, accepted, drafted=None, seconds=0.05):
    """One round; returns its plan and schedule."""
    plan = policy.plan(rows)
    drafted = tuple(plan.widths if drafted is None else map(min, plan.widths, drafted))
    given_c = [c[:n] for c, n in zip(confidence, drafted, strict=True)]
    made = policy.schedule(rows, drafted, given_c if plan.look and any(drafted) else None)
    took = tuple(min(a, n) for a, n in zip(accepted, made.lengths, strict=True))
    policy.observe(
        Outcome(
            tuple(rows), drafted, made.lengths, took, tuple(a + 1 for a in took),
            tuple(map(tuple, given_c)), 0.003 if plan.look else 0.0, seconds,
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
        pathwise=st.booleans(),
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
            if plan.look and row.cuts.p_min:
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
    text = [Script("lies", np.full((300, 7), 0.95), (0,) * 300) for _ in range(2 * concurrency)]
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


def test_a_row_that_never_wins_is_not_drafted_for():
    policy = Auto(tables()["cpu-2-cores"])
    rows = (view("good"), view("bad"))
    for _ in range(60):
        plan, _ = play(policy, rows, [[0.95] * 7, [0.01] * 7], [7, 0])
    assert plan.widths[0] > 0 and plan.widths[1] == 0
    assert worth_drafting(policy.learner, rows, (7, 7), 20.0) == (7, 0)


def test_auto_says_which_rule_it_used_and_uses_the_optimum_only_where_it_is_lossless():
    rng = np.random.default_rng(0)
    for pathwise, rule in ((True, "optimum"), (False, "causal")):
        policy, seen = Auto(tables()["m4-pro-quantised"]), set()
        for _ in range(150):
            c = rng.beta(3, 1, 7).tolist()
            accepted = int(np.cumprod(rng.random(7) < c).sum())
            _, made = play(policy, (view(pathwise=pathwise),), [c], [accepted])
            seen.add(made.policy)
        assert rule in seen and seen <= {rule, "lagged", "plain", "probe", "check"}


def test_one_row_that_must_not_anticipate_binds_the_batch():
    policy, rng = Auto(tables()["m4-pro-quantised"]), np.random.default_rng(0)
    rows = (view("a"), view("b", pathwise=False))
    for _ in range(80):
        c = rng.beta(3, 1, (2, 7))
        accepted = np.cumprod(rng.random((2, 7)) < c, axis=1).sum(axis=1).tolist()
        _, made = play(policy, rows, c.tolist(), accepted)
        assert made.policy != "optimum"


def test_nothing_is_kept_of_rows_that_left():
    policy = Auto(tables()["flat"])
    for i in range(1000):
        play(policy, (view(f"r{i}"),), [[0.9] * 7], [3])
    assert len(policy.learner.history._rows) <= KEPT_ROWS
    assert len(policy.learner._asked) == 1


def test_an_empty_batch_and_rows_without_a_proposer_are_plain():
    policy = Auto(tables()["flat"])
    assert policy.plan(()).widths == ()
    plan, made = play(policy, (view(block=0), view("s", remaining=1)), [[], []], [0, 0])
    assert plan.widths == made.lengths == (0, 0) and not plan.look


# -- the bound on what may be lost -------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0.02, 0.5), st.integers(1, 8)), max_size=300))
def test_the_budget_bounds_the_loss(rounds):
    """Whatever drafting brings, what it loses stays within share, credit and one round."""
    budget, plain_rate, lost, total, worst = Budget(), 20.0, 0.0, 0.0, 0.0
    for seconds, tokens in rounds:
        if budget.left(0.0, 1 / plain_rate):
            budget.round(seconds)
            budget.charge(seconds, tokens, plain_rate, 1)
            lost += seconds - tokens / plain_rate
            total += seconds
        else:
            budget.round(1 / plain_rate)
            total += 1 / plain_rate
        worst = max(worst, lost - 0.007 * total)
    assert worst <= 1.5 / plain_rate + 0.5


def test_another_state_of_the_device_allows_the_credit_once_more_and_no_more():
    budget, plain = Budget(), 0.05
    while budget.left(0.0, plain):
        budget.charge(0.2, 1, 1 / plain, 1)
    assert not budget.proven
    budget.renew()
    assert budget.proven and budget.left(1.9 * plain, plain) and not budget.left(2.1 * plain, plain)
    gained = Budget()
    gained.charge(0.1, 8, 1 / plain, 1)
    kept = gained.lost
    gained.renew()
    assert gained.lost == kept < 0.0


def test_new_replies_may_lose_a_little_again_and_never_more_than_the_credit():
    """Not knowing what earlier ones had lost; a flood of them adds nothing up."""
    budget, plain = Budget(), 0.05
    budget.welcome(1.0, plain)
    assert budget.lost == 0.0  # nothing was lost
    while budget.left(0.0, plain):
        budget.charge(0.2, 1, 1 / plain, 1)
    budget.welcome(0.25, plain)
    assert budget.left(0.18 * plain, plain) and not budget.left(0.2 * plain, plain)
    for _ in range(100):
        budget.welcome(1.0, plain)
    assert budget.left(1.9 * plain, plain) and not budget.left(2.1 * plain, plain)


def test_drafting_is_taken_up_again_only_for_a_clear_difference():
    switch = Switch()
    assert switch.update(10.0, 10.1)
    assert not switch.update(10.0, 9.9)
    assert not switch.update(10.0, 10.1)
    assert switch.update(10.0, 10.3)


def test_new_replies_begin_with_what_several_texts_were_worth() -> None:
    """Not with the end of the last one: it says little of the next."""
    history = History(Honesty())
    ends = []
    for text, chance in enumerate((0.9, 0.2, 0.9, 0.2, 0.9, 0.2)):
        view = RowView(f"r{text}", "dspark", 4, 500, 100, True, True)
        for _ in range(60):
            outcome = Outcome((view,), (4,), (4,), (1,), (2,), ((chance,) * 4,), 0.0, 0.1, 0.1)
            history.observe(outcome, (4,), np.full((1, 4), chance))
        ends.append(float(history.ring(RowView(f"n{text}", "dspark", 4, 500, 0, True)).mean[1]))
        assert abs(history.ring(view).mean[1] - chance) < 1e-9, "its own rounds are all it has"
    assert ends[0] == pytest.approx(0.9)
    assert all(0.3 < end < 0.85 for end in ends[2:]), ends


def test_plain_rounds_in_a_row_are_priced_as_they_are_run() -> None:
    """Each is begun before the last was read, so the host work between them is hidden."""
    step, draft = {0: {1: {1: 0.1, 2: 0.11}}}, {"dspark": {1: {1: 0.01}}}
    # 1.35 tokens in 0.12 s: better than one in 0.1 s, worse than one in 0.08 s.
    accepts = tuple(int(hit) for hit in np.random.default_rng(3).random(600) < 0.35)
    text = Script("text", np.full((600, 1), 0.35), accepts)
    for overlap, drafts in ((0.0, True), (0.02, False)):
        cost = CostModel(step, draft, overlap=overlap)
        run = simulate(Auto(cost), [text], cost)
        plain, drafted = (fixed_length(n, [text], cost).tps for n in (0, 1))
        assert bool(drafted > plain) is drafts
        assert run.tps > 0.98 * max(plain, drafted)
        assert bool(np.mean(run.widths) > 0.5) is drafts


def steady(policy, rows, rounds, confidence=0.9):
    """So many rounds alike; how many of them were decided anew."""
    decided = 0
    decide = policy._plan_anew

    def count(views):
        nonlocal decided
        decided += 1
        return decide(views)

    policy._plan_anew = count
    plans = [
        play(policy, rows, [[confidence] * row.block for row in rows], [row.block for row in rows])
        for _ in range(rounds)
    ]
    policy._plan_anew = decide
    return decided, plans


@pytest.mark.parametrize("confidence", [0.99, 0.02])
def test_a_choice_that_comes_out_again_holds_for_some_rounds(confidence):
    policy = Auto(tables()["flat" if confidence > 0.5 else "linear"])
    rows = [view("a"), view("b")]
    steady(policy, rows, 40, confidence)
    decided, plans = steady(policy, rows, 40, confidence)
    assert decided <= 20, "else it is decided anew each round"
    assert any(plans[-1][0].widths) == (confidence > 0.5)


def test_a_held_choice_ends_with_what_it_was_made_for():
    policy = Auto(tables()["flat"])
    rows = [view("a"), view("b")]

    def holding():
        steady(policy, rows, 40)
        while policy._left < HOLD:
            steady(policy, rows, 1)

    for changed in (
        [view("a")],
        [view("a"), view("c")],
        [view("a"), view("b", remaining=3)],
        [view("a"), view("b", cuts=Cuts(draft_length=1))],
        [view("a"), view("b", block=2)],
        [view("a"), dataclasses.replace(view("b"), foreseen=(0.9,) * 7)],
    ):
        holding()
        decided, [(plan, _)] = steady(policy, changed, 1)
        assert decided == 1
        assert all(n <= row.cap for n, row in zip(plan.widths, changed, strict=True))


def test_every_round_is_learned_from_once_whether_its_choice_held_or_not():
    policy, seen = Auto(tables()["flat"]), []
    learn = policy.learner.observe
    policy.learner.observe = lambda outcome: (seen.append(outcome), learn(outcome))[1]
    rows = [view("a"), view("b")]
    steady(policy, rows, 41)
    steady(policy, [view("a"), view("c")], 9)
    assert len({id(outcome) for outcome in seen}) == len(seen)
    assert 50 - HOLD - 1 <= len(seen) <= 50
    kept = policy.learner._asked
    assert set(kept) == {"a", "c"}


def test_rounds_promised_to_be_plain_are_promised_once():
    """Where each begins before the last was read, ten of them pass on one plan."""
    policy = Auto(tables()["linear"])
    rows = [view("a")]
    steady(policy, rows, 40, 0.02)
    since, longest = 0, 0
    decide = policy._plan_anew

    def count(views):
        nonlocal since
        since = 0
        return decide(views)

    policy._plan_anew = count
    promised = most = 0
    for _ in range(60):
        if promised:
            promised -= 1
            outcome = Outcome(
                tuple(rows), (0,), (0,), (0,), (1,), ((),), 0.0, 0.05, 0.05, overlapped=True
            )
            policy.observe(outcome)
        else:
            plan, _ = play(policy, rows, [[0.02] * 7], [0])
            promised = plan.plain_ahead
            most = max(most, promised)
        since += 1
        longest = max(longest, since)
    assert most == AHEAD, "else nothing is shown here"
    assert longest <= AHEAD + 1


def test_a_held_draft_that_loses_more_than_it_may_ends_at_once():
    policy = Auto(tables()["flat"])
    rows = [view("a")]
    steady(policy, rows, 40, 0.99)
    while policy._left < HOLD:
        steady(policy, rows, 1, 0.99)
    policy.budget.lost = policy.budget.earned + 10.0
    policy.budget._won = -1.0
    play(policy, rows, [[0.99] * 7], [0], seconds=5.0)
    assert policy._left <= 0
    plan, _ = play(policy, rows, [[0.99] * 7], [0])
    assert not any(plan.widths)
