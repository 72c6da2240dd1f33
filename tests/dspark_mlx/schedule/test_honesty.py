"""The running correction becomes honest, stays ordered and bounded, and starts cautious."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_mlx.schedule.calibration import sigmoid
from dspark_mlx.schedule.honesty import Honesty
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


def feed(honesty, view, rounds, distort, seed=0):
    """Rounds of 4 tokens; returns what was predicted and what happened in the second half."""
    rng = np.random.default_rng(seed)
    predicted, happened = [], []
    for i in range(rounds):
        truth = rng.normal(0.8, 1.0, 4)
        hits = rng.random(4) < sigmoid(truth)
        accepted = int(np.cumprod(hits).sum())
        confidence = distort(sigmoid(truth)).tolist()
        honest = honesty.correct([view], [4], [confidence])[0]
        if i > rounds // 2:
            for k in range(min(accepted + 1, 4)):
                predicted.append(honest[k])
                happened.append(k < accepted)
        honesty.observe(outcome(view, confidence, accepted))
    return np.mean(predicted), np.mean(happened)


@pytest.mark.parametrize(
    "distort",
    [lambda p: p, lambda p: p**0.3, lambda p: p**3, lambda p: 0 * p + 0.99, lambda p: 0 * p + 0.05],
)
@pytest.mark.parametrize("calibrated", [True, False])
def test_any_confidence_becomes_honest(distort, calibrated):
    predicted, happened = feed(Honesty(), row(calibrated), 600, distort)
    assert predicted == pytest.approx(happened, abs=0.06)


def test_uncalibrated_confidences_start_lower():
    honesty = Honesty()
    high = [[0.9, 0.9, 0.9, 0.9]]
    sure = honesty.correct([row(True)], [4], high)[0]
    wary = honesty.correct([row(False)], [4], high)[0]
    assert np.all(wary < sure) and sure == pytest.approx([0.9] * 4)


def test_without_confidences_the_rate_per_position_stands_in():
    honesty = Honesty()
    view = row(method="lookup")
    for i in range(300):
        honesty.observe(outcome(view, (), 0, scheduled=0))
        made = Outcome((view,), (4,), (4,), (2 if i % 2 else 0,), (3,), ((),), 0.0, 0.1, 0.1)
        honesty.observe(made)
    rates = honesty.correct([view], [4], None)[0]
    assert rates[0] == pytest.approx(0.5, abs=0.05)
    assert rates[1] > 0.9 and rates[2] < 0.1


def test_a_reply_that_ended_inside_its_draft_counts_no_rejection():
    ended, rejected = Honesty(), Honesty()
    for _ in range(100):
        ended.observe(outcome(row(), [0.9] * 4, 2, committed=2))
        rejected.observe(outcome(row(), [0.9] * 4, 2, committed=3))
    at_end = ended.correct([row()], [4], [[0.9] * 4])[0]
    assert at_end[2] >= 0.9 > 0.2 > rejected.correct([row()], [4], [[0.9] * 4])[0][2]


def test_tokens_beyond_a_draft_have_no_chance():
    out = Honesty().correct([row(), row()], [1, 3], [[0.9], [0.9, 0.8, 0.7]])
    assert out.shape == (2, 3)
    assert out[0].tolist() == [pytest.approx(0.9), 0.0, 0.0]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=80),
    st.lists(st.floats(0, 1), min_size=2, max_size=10),
)
def test_the_correction_preserves_order_and_stays_between_0_and_1(past, values):
    honesty = Honesty()
    view = row(False)
    for c, hit in past:
        honesty.observe(outcome(view, (c,), int(hit)))
    out = [float(honesty.correct([view], [1], [[v]])[0, 0]) for v in sorted(values)]
    assert all(0.0 <= v <= 1.0 for v in out)
    assert all(a <= b for a, b in itertools.pairwise(out))
