"""Prices stay as measured, between points too, are never flat beyond them, and learn."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_mlx.bench.simulator.tables import tables
from dspark_mlx.errors import UsageError
from dspark_mlx.events import from_json, to_json
from dspark_mlx.schedule.cost import CostKey, CostModel

STAIRCASE = {1: 1.0, 2: 1.0, 4: 1.0, 5: 1.8, 8: 1.9}
POINTS = st.dictionaries(st.integers(1, 17), st.floats(1e-4, 10.0), min_size=1, max_size=8)
TABLES = st.dictionaries(st.integers(1, 8), POINTS, min_size=1, max_size=4)


def test_measured_points_are_kept_as_measured():
    model = CostModel({0: {1: STAIRCASE}})
    assert [model.seconds(1, w) for w in STAIRCASE] == list(STAIRCASE.values())
    assert model.seconds(1, 6) == pytest.approx(1.8 + 0.1 / 3)


def test_a_wider_step_that_was_faster_stays_so():
    """A kernel may be faster at a multiple of its tile; only what noise explains is evened out."""
    model = CostModel({0: {1: {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.02, 6: 1.3}}})
    assert model.steps(1, 0, 5).tolist() == pytest.approx([1.0, 1.1, 1.2, 1.02, 1.16, 1.3])


@given(TABLES, st.integers(1, 8), st.integers(0, 5000))
def test_a_price_between_two_measured_widths_lies_between_theirs(table, rows, context):
    model = CostModel({0: table})
    curve = model.steps(rows, context, 20)
    assert np.all(curve > 0) and np.all(np.isfinite(curve))
    if rows in table:
        for low, high in pairwise(sorted(table[rows])):
            ends = sorted((table[rows][low], table[rows][high]))
            inside = curve[low - 1 : high]
            assert inside.min() >= ends[0] - 1e-9 and inside.max() <= ends[1] + 1e-9


def test_prices_learned_from_rounds_never_fall_with_the_width():
    model = CostModel()
    for width, seconds in ((1, 1.0), (3, 1.4), (5, 1.2)):
        model.learn(1, width, seconds)
    assert np.all(np.diff(model.steps(1, 0, 6)) >= 0)


@given(POINTS)
def test_the_price_is_never_flat_beyond_what_was_measured(points):
    model = CostModel({0: {1: points}})
    last = max(points)
    curve = model.steps(1, 0, last + 8)[last - 1 :]
    assert np.all(np.diff(curve) > 0)


def test_a_flat_table_still_grows_beyond_its_end():
    model = CostModel({0: {1: {1: 1.0, 8: 1.0}}})
    assert model.seconds(1, 8) == 1.0 < model.seconds(1, 9) < model.seconds(1, 17)


def test_one_point_is_extrapolated_in_proportion():
    assert CostModel({0: {1: {2: 3.0}}}).seconds(1, 6) == pytest.approx(9.0)


def test_unmeasured_rows_are_priced_by_their_tokens():
    model = CostModel({0: {2: {1: 1.0, 4: 2.0, 8: 4.0}}})
    assert model.seconds(4, 4) == pytest.approx(model.seconds(2, 8))
    assert model.seconds(1, 8) == pytest.approx(model.seconds(2, 4))
    wide = CostModel({0: {1: {1: 1.0, 4: 1.5}, 3: {1: 1.4, 4: 3.5}}})
    assert wide.seconds(2, 4) == pytest.approx(2.5)


def test_longer_contexts_cost_what_was_measured_and_more_beyond():
    model = CostModel({0: {1: {1: 1.0, 8: 2.0}}, 4096: {1: {1: 1.4, 8: 3.0}}})
    costs = [model.seconds(1, 8, c) for c in (0, 2048, 4096, 8192)]
    assert costs == sorted(costs) and costs[0] == 2.0
    assert costs[2] == pytest.approx(3.0, rel=0.05) and costs[3] > 3.7


def test_a_method_without_a_draft_table_drafts_for_nothing():
    model = tables()["cpu-2-cores"]
    assert model.drafts("lookup", 4, 7).sum() == 0.0
    assert model.drafts("dspark", 1, 8)[8] == pytest.approx(0.016)
    assert model.drafts("dspark", 0, 7).sum() == 0.0


def test_the_published_and_measured_ratios_are_in_the_tables():
    m4, cpu = tables()["m4-pro-quantised"], tables()["cpu-2-cores"]
    assert m4.seconds(1, 4) / m4.seconds(1, 1) == pytest.approx(1.47)
    assert m4.seconds(1, 8) / m4.seconds(1, 1) == pytest.approx(2.69)
    assert [round(1e3 * cpu.seconds(1, w)) for w in range(1, 8)] == [
        105, 121, 129, 143, 150, 155, 160,
    ]  # fmt: skip


def test_json_round_trip_keeps_every_price_and_the_key():
    key = CostKey("m", "4bit", "cpu", "0.32.4")
    model = CostModel(
        {0: {1: STAIRCASE}, 2048: {1: STAIRCASE, 2: {1: 1.5}}},
        {"dspark": {1: {7: 0.1}}},
        overhead=0.01,
        sync_overhead=0.002,
        key=key,
    )
    again = CostModel.from_json(model.to_json())
    assert (again.step, again.draft, again.key) == (model.step, model.draft, key)
    assert (again.overhead, again.sync_overhead, again.profiled) == (0.01, 0.002, True)
    event = model.to_event((1, 2), 4, "dspark")
    assert from_json(to_json(event)) == event and len(event.step_seconds[1]) == 5


def test_a_table_of_an_older_version_is_read():
    text = CostModel({0: {1: {1: 0.1}}}, sync_overhead=0.003).to_json()
    old = json.loads(text)
    old["look"] = old.pop("sync_overhead")
    del old["overlap"]
    assert CostModel.from_json(json.dumps(old)).sync_overhead == 0.003


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"step": {}}',
        '{"step": {"0": {"1": {"1": -1}}}, "draft": {}, "overhead": 0, "look": 0}',
        '{"step": {"0": {"1": {"1": 0}}}, "draft": {}, "overhead": 0, "look": 0}',
        '{"step": {"0": {"1": {"0": 1, "-3": 1}}}, "draft": {}, "overhead": 0, "look": 0}',
        '{"step": {"0": {"0": {"1": 1}}}, "draft": {}, "overhead": 0, "look": 0}',
        '{"step": {"0": {"1": {"1": 1e308}}}, "draft": {}, "overhead": 0, "look": 0}',
        '{"step": {"0": {"1": {"1": 1}}}, "draft": {"x": {"0": {"1": 1}}}, '
        '"overhead": 0, "look": 0}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:60],
)
def test_a_broken_table_is_refused(text):
    with pytest.raises(UsageError):
        CostModel.from_json(text)


def test_a_draft_without_prices_costs_nothing():
    table = '{"step": {"0": {"1": {"1": 1}}}, "draft": {"x": {"1": {}}}, "overhead": 0, "look": 0}'
    assert CostModel.from_json(table).drafts("x", 1, 3).tolist() == [0.0] * 4


def test_an_empty_model_says_so_and_learns_the_median():
    model = CostModel()
    assert not model.known
    with pytest.raises(UsageError, match="no measurements"):
        model.seconds(1, 1)
    for seconds in (9.0, 1.0, 1.1, 1.0, 0.9):  # the first one compiled
        model.learn(1, 1, seconds)
    for seconds in (1.5, 1.6, 1.4):
        model.learn(1, 5, seconds)
    assert model.known and not model.profiled
    assert model.seconds(1, 1) == 1.0 and model.seconds(1, 5) == 1.5
    assert model.seconds(1, 3) == pytest.approx(1.25)


def test_a_profile_is_not_overwritten_by_rounds():
    model = CostModel({0: {1: {1: 1.0, 4: 2.0}}})
    model.learn(1, 4, 50.0)
    assert model.seconds(1, 4) == 2.0
