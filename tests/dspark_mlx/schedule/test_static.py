"""Static policies obey their limits and every row's own cuts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_mlx.errors import UsageError
from dspark_mlx.request import Cuts
from dspark_mlx.schedule import make_policy
from dspark_mlx.schedule.limits import stricter
from dspark_mlx.schedule.policy import RowView


def row(block=7, remaining=100, cuts=None, **kw):
    return RowView("r", "dspark", block, remaining, 50, True, cuts=cuts or Cuts(), **kw)


CUTS = st.builds(
    Cuts,
    draft_length=st.none() | st.integers(0, 9),
    p_min=st.floats(0, 1),
    p_survival_min=st.floats(0, 1),
)


def test_off_drafts_and_verifies_nothing():
    policy = make_policy("off")
    assert policy.plan([row(), row()]).widths == (0, 0)
    assert policy.schedule([row()], [0], None).lengths == (0,)


def test_fixed_stops_at_the_reply_s_end():
    policy = make_policy("fixed", draft_length=4)
    rows = [row(), row(remaining=3), row(remaining=1), row(block=0), row(cuts=Cuts(draft_length=1))]
    plan = policy.plan(rows)
    assert plan.widths == (4, 2, 0, 0, 1) and not plan.needs_confidence
    assert policy.schedule(rows, plan.widths, None).lengths == plan.widths


def test_fixed_looks_only_when_a_row_asks_for_it():
    policy = make_policy("fixed", draft_length=4)
    rows = [row(), row(cuts=Cuts(p_min=0.5))]
    assert policy.plan(rows).needs_confidence
    done = policy.schedule(rows, [4, 4], [[0.1] * 4, [0.9, 0.8, 0.4, 0.9]])
    assert done.lengths == (4, 2)
    assert done.reasons[1] == "confidence 0.40 of token 3 is below 0.5"


def test_survival_cut_stops_before_the_product_falls_below():
    policy = make_policy("threshold", p_survival_min=0.5)
    assert policy.schedule([row()], [4], [[0.9, 0.8, 0.6, 0.9]]).lengths == (2,)


def test_a_proposer_without_confidences_is_cut_by_length_alone():
    policy = make_policy("threshold", p_min=0.5, draft_length=3)
    done = policy.schedule([row()], [5], [[]])
    assert done.lengths == (3,) and "no confidence" in done.reasons[0]


@given(CUTS, CUTS, st.lists(st.floats(0, 1), min_size=7, max_size=7), st.integers(1, 12))
def test_lengths_stay_within_every_limit(mine, theirs, confidence, remaining):
    policy = make_policy(
        "threshold",
        draft_length=mine.draft_length,
        p_min=mine.p_min,
        p_survival_min=mine.p_survival_min,
    )
    view = row(remaining=remaining, cuts=theirs)
    width = policy.plan([view]).widths[0]
    assert 0 <= width <= min(7, remaining - 1)
    (length,) = policy.schedule([view], [width], [confidence[:width]]).lengths
    assert 0 <= length <= width
    both = stricter(mine, theirs)
    product = 1.0
    for c in confidence[:length]:
        product *= c
        assert c >= both.p_min and product >= both.p_survival_min


@pytest.mark.parametrize("name", ["", "fast", "Auto"])
def test_unknown_names_are_refused(name):
    with pytest.raises(UsageError, match="no schedule named"):
        make_policy(name)


def test_fixed_refuses_confidence_cuts():
    with pytest.raises(UsageError, match="threshold"):
        make_policy("fixed", p_min=0.5)
