"""Confidences become calibrated, stay ordered and bounded; rows begin with their method's mean."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_mlx.draft.dspark.calibration_fit import sigmoid
from dspark_mlx.schedule.acceptance import KEPT_ROWS, Acceptance, OnlineCalibrator
from dspark_mlx.schedule.policy import Outcome, RowView


def row(calibrated=True, method="dspark"):
    return RowView("r", method, 4, 100, 10, True, calibrated)


def outcome(view, confidence, accepted, scheduled=None, committed=None):
    n = len(confidence)
    scheduled = n if scheduled is None else scheduled
    committed = accepted + 1 if committed is None else committed
    return Outcome(
        (view,), (n,), (scheduled,), (accepted,), (committed,), (tuple(confidence),), 0.0, 0.1, 0.1
    )


def feed(calibrator, view, rounds, distort, seed=0):
    """Rounds of 4 tokens; returns what was predicted and what happened in the second half."""
    rng = np.random.default_rng(seed)
    predicted, happened = [], []
    for i in range(rounds):
        truth = rng.normal(0.8, 1.0, 4)
        hits = rng.random(4) < sigmoid(truth)
        accepted = int(np.cumprod(hits).sum())
        confidence = distort(sigmoid(truth)).tolist()
        corrected = calibrator.correct([view], [4], [confidence])[0]
        if i > rounds // 2:
            for k in range(min(accepted + 1, 4)):
                predicted.append(corrected[k])
                happened.append(k < accepted)
        calibrator.observe(outcome(view, confidence, accepted))
    return np.mean(predicted), np.mean(happened)


@pytest.mark.parametrize(
    "distort",
    [lambda p: p, lambda p: p**0.3, lambda p: p**3, lambda p: 0 * p + 0.99, lambda p: 0 * p + 0.05],
)
@pytest.mark.parametrize("calibrated", [True, False])
def test_any_confidence_becomes_honest(distort, calibrated):
    predicted, happened = feed(OnlineCalibrator(), row(calibrated), 600, distort)
    assert predicted == pytest.approx(happened, abs=0.06)


def test_uncalibrated_confidences_start_lower():
    calibrator = OnlineCalibrator()
    high = [[0.9, 0.9, 0.9, 0.9]]
    sure = calibrator.correct([row(True)], [4], high)[0]
    wary = calibrator.correct([row(False)], [4], high)[0]
    assert np.all(wary < sure) and sure == pytest.approx([0.9] * 4)


def test_without_confidences_the_rate_per_position_stands_in():
    calibrator = OnlineCalibrator()
    view = row(method="lookup")
    for i in range(300):
        calibrator.observe(outcome(view, (), 0, scheduled=0))
        made = Outcome((view,), (4,), (4,), (2 if i % 2 else 0,), (3,), ((),), 0.0, 0.1, 0.1)
        calibrator.observe(made)
    rates = calibrator.correct([view], [4], None)[0]
    assert rates[0] == pytest.approx(0.5, abs=0.05)
    assert rates[1] > 0.9 and rates[2] < 0.1


def test_a_reply_that_ended_inside_its_draft_counts_no_rejection():
    ended, rejected = OnlineCalibrator(), OnlineCalibrator()
    for _ in range(100):
        ended.observe(outcome(row(), [0.9] * 4, 2, committed=2))
        rejected.observe(outcome(row(), [0.9] * 4, 2, committed=3))
    at_end = ended.correct([row()], [4], [[0.9] * 4])[0]
    assert at_end[2] >= 0.9 > 0.2 > rejected.correct([row()], [4], [[0.9] * 4])[0][2]


def test_tokens_beyond_a_draft_have_no_chance():
    out = OnlineCalibrator().correct([row(), row()], [1, 3], [[0.9], [0.9, 0.8, 0.7]])
    assert out.shape == (2, 3)
    assert out[0].tolist() == [pytest.approx(0.9), 0.0, 0.0]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=80),
    st.lists(st.floats(0, 1), min_size=2, max_size=10),
)
def test_the_correction_preserves_order_and_stays_between_0_and_1(past, values):
    calibrator = OnlineCalibrator()
    view = row(False)
    for c, hit in past:
        calibrator.observe(outcome(view, (c,), int(hit)))
    out = [float(calibrator.correct([view], [1], [[v]])[0, 0]) for v in sorted(values)]
    assert all(0.0 <= v <= 1.0 for v in out)
    assert all(a <= b for a, b in itertools.pairwise(out))


# -- gain curves -----------------------------------------------------------------------------


def played(acceptance, name, chance, rounds=60):
    view = RowView(name, "dspark", 4, 500, 100, True, True)
    for _ in range(rounds):
        acceptance.observe(
            Outcome((view,), (4,), (0,), (0,), (1,), ((chance,) * 4,), 0.0, 0.1, 0.1)
        )
    return view


def test_a_row_is_soon_known_by_its_own_rounds_and_a_new_one_begins_with_its_method_s():
    acceptance = Acceptance()
    easy, hard = played(acceptance, "easy", 0.9), played(acceptance, "hard", 0.2)
    assert acceptance.gains(easy)[4] > 2.0 > 0.6 > acceptance.gains(hard)[4]
    new = acceptance.gains(RowView("new", "dspark", 4, 500, 0, True, True))
    assert acceptance.gains(hard)[4] < new[4] < acceptance.gains(easy)[4]
    assert (np.diff(new) > 0).all() and new[0] == 0.0


def test_the_gains_of_a_copy_are_those_of_its_confidences():
    """And a copy says nothing of what is drafted."""
    acceptance = Acceptance()
    view = RowView("r", "dspark", 4, 500, 0, True, True)
    before = acceptance.gains(view).tolist()
    copy = RowView("r", "dspark", 3, 500, 0, True, known_confidence=(0.9, 0.9, 0.9))
    gains = acceptance.gains(copy)
    assert len(gains) == 4 and (np.diff(gains) > 0).all()
    assert acceptance.gains(
        RowView("r", "dspark", 0, 9, 0, True, known_confidence=())
    ).tolist() == [0]
    acceptance.observe(Outcome((copy,), (3,), (3,), (3,), (4,), ((0.9,) * 3,), 0.0, 0.1, 0.1))
    assert acceptance.gains(view).tolist() == before


def test_a_short_draft_is_taken_to_go_on_as_usual():
    acceptance = Acceptance()
    view = RowView("r", "dspark", 4, 500, 0, True, True)
    for _ in range(80):
        acceptance.observe(Outcome((view,), (2,), (2,), (2,), (3,), ((0.95, 0.95),), 0.0, 0.1, 0.1))
    gains = acceptance.gains(view)
    assert 1.7 < gains[2] < gains[3] < gains[4] < 4.0


def test_nothing_is_kept_of_rows_that_left():
    acceptance = Acceptance()
    for i in range(1000):
        played(acceptance, f"r{i}", 0.5, rounds=1)
    assert len(acceptance._rows) <= KEPT_ROWS
