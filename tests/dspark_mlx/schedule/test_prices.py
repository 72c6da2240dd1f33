"""Prices follow the device within a few rounds, and one odd round moves them little."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_mlx.schedule.cost import CostModel
from dspark_mlx.schedule.policy import Outcome, RowView
from dspark_mlx.schedule.round_prices import BOUND, Drift, Prices

COST = CostModel(
    {0: {1: {1: 0.1, 8: 0.17}, 2: {1: 0.11, 8: 0.2}}}, {"dspark": {1: {7: 0.02}, 2: {7: 0.03}}},
    overhead=0.001, sync_overhead=0.002,
)  # fmt: skip


def row(name="r", **options):
    return RowView(name, "dspark", 7, 100, 0, True, True, **options)


def played(rows, drafted, seconds, draft_seconds=0.0):
    n = len(rows)
    drafts = (drafted,) * n
    confidence = ((0.5,) * drafted,) * n
    return Outcome(
        tuple(rows), drafts, drafts, drafts, (1,) * n, confidence, draft_seconds, 0.1, seconds
    )


def test_a_round_is_its_step_draft_sync_and_overhead():
    prices = Prices(COST)
    assert prices.plain([row()]) == pytest.approx(0.101)
    seconds = prices.drafting([row()], [7], 7, sync=True)
    assert seconds[7] == pytest.approx(0.17 + 0.02 + 0.002 + 0.001)
    assert seconds[0] == pytest.approx(0.1 + 0.02 + 0.002 + 0.001)


def test_a_known_draft_costs_nothing_unless_its_proposer_runs_for_another_row():
    prices, copy = Prices(COST), row("c", known_confidence=(0.9,) * 7)
    assert prices.drafts([copy], [7]).tolist() == [0.0] * 8
    assert prices.drafts([copy, row()], [7, 7])[7] == pytest.approx(0.03)


def test_a_slowdown_is_seen_and_forgotten_within_fifteen_rounds():
    prices = Prices(COST)
    for factor in (1.0, 2.0, 1.0):
        for _ in range(15):
            prices.observe(played([row()], 0, 0.101 * factor))
        assert prices.plain([row()]) == pytest.approx(0.101 * factor, rel=0.15)


@pytest.mark.parametrize("odd", [0.001, 100.0])
def test_one_odd_round_moves_little(odd):
    prices = Prices(COST)
    for seconds in (*[0.101] * 20, odd):
        prices.observe(played([row()], 0, seconds))
    assert prices.plain([row()]) == pytest.approx(0.101, rel=0.06)


@given(st.lists(st.floats(1e-9, 1e9), max_size=80))
def test_the_drift_is_bounded(rounds):
    drift = Drift()
    for seconds in rounds:
        drift.update(1.0, seconds)
    assert abs(drift.log) <= BOUND


def test_without_a_profile_widths_are_measured_in_turn():
    prices, asked = Prices(), []
    while (width := prices.unmeasured([row()])) is not None:
        asked.append(width)
        prices.observe(played([row()], width, 0.1 + 0.01 * width))
    assert asked == [0] * 3 + [2] * 3 + [4] * 3 + [7] * 3
    assert prices.cost.known and not prices.cost.profiled


def test_copies_do_not_teach_what_drafted_rounds_cost():
    prices = Prices()
    prices.observe(played([row()], 4, 0.2))
    for _ in range(5):
        prices.observe(played([row(known_confidence=(0.9,) * 7)], 4, 0.1))
    assert prices.cost.samples(1, 5) == 1
