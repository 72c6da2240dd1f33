"""STS lowers the calibration error left to right and never reorders; errors are measured right."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_mlx.draft.dspark.calibration_fit import (
    LEAST_SLOPE,
    apply,
    auc,
    blend,
    ece,
    fit,
    log_loss,
    logit,
    reliability,
    sigmoid,
)
from dspark_mlx.errors import UsageError


def blocks(n=4000, k=5, sharp=1.8, seed=0):
    """Blocks whose confidences are ``sharp`` times too sure, and what was accepted."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(1.0, 1.2, size=(n, k))
    hit = rng.random((n, k)) < sigmoid(truth)
    return sigmoid(sharp * truth), np.cumprod(hit, axis=1).sum(axis=1)


def test_fit_recovers_the_temperature_and_lowers_the_error():
    confidence, accepted = blocks()
    found = fit(confidence, accepted)
    assert all(1.3 < t < 2.6 for t in found.temperatures)
    assert all(a < b for a, b in zip(found.ece_after, found.ece_before, strict=True))
    assert max(found.ece_after) < 0.03
    held_out, outcome = blocks(seed=1)
    survival = np.cumprod(apply(held_out, found.temperatures), axis=1)
    assert ece(survival[:, -1], outcome > 4) < ece(np.cumprod(held_out, axis=1)[:, -1], outcome > 4)


def test_an_honest_head_is_left_alone():
    confidence, accepted = blocks(sharp=1.0)
    assert all(0.8 < t < 1.25 for t in fit(confidence, accepted).temperatures)


def test_offsets_are_found_where_a_temperature_cannot_help():
    rng = np.random.default_rng(5)
    truth = rng.normal(0.0, 1.0, size=(6000, 2))
    accepted = np.cumprod(rng.random((6000, 2)) < sigmoid(truth), axis=1).sum(axis=1)
    told = sigmoid(truth + 0.7)
    assert max(fit(told, accepted).ece_after) > 0.05
    found = fit(told, accepted, offsets=True)
    assert found.offsets == pytest.approx((-0.7, -0.7), abs=0.25)
    assert max(found.ece_after) < 0.03
    assert np.allclose(
        apply(told, found.temperatures, found.offsets),
        sigmoid(logit(told) / found.temperatures + found.offsets),
    )


def test_fit_uses_blocks_that_were_cut_short():
    confidence, accepted = blocks(n=20000)
    reached = np.random.default_rng(2).integers(2, 6, size=20000)
    found = fit(confidence, np.minimum(accepted, reached), reached)
    assert all(1.2 < t < 2.8 for t in found.temperatures)


def test_fit_refuses_too_little_data():
    confidence, accepted = blocks(n=150)
    with pytest.raises(UsageError, match="only 150 rounds"):
        fit(confidence, accepted)


@pytest.mark.parametrize(
    ("confidence", "accepted"),
    [
        (np.ones((300, 3)) * 1.2, np.zeros(300, int)),
        (np.ones((300, 3)) * 0.5, np.full(300, 4)),
        (np.ones(300), np.zeros(300, int)),
    ],
)
def test_fit_refuses_impossible_data(confidence, accepted):
    with pytest.raises(UsageError):
        fit(confidence, accepted)


@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=20),
    st.floats(0.2, 5),
)
def test_temperatures_preserve_order(values, temperature):
    out = apply(np.array(values)[:, None], [temperature])[:, 0]
    order = np.argsort(values, kind="stable")
    assert np.all(np.diff(out[order]) >= 0)
    assert np.all((out >= 0) & (out <= 1))


def test_apply_refuses_missing_temperatures():
    with pytest.raises(UsageError, match="temperatures for 1"):
        apply(np.ones((2, 3)), [1.0])


def test_ece_and_reliability_agree():
    rng = np.random.default_rng(3)
    p = rng.random(5000)
    y = rng.random(5000) < p**2
    bars = reliability(p, y)
    assert sum(b.count for b in bars) == 5000
    by_hand = sum(b.count * abs(b.predicted - b.observed) for b in bars) / 5000
    assert ece(p, y) == pytest.approx(by_hand)
    assert ece(p, rng.random(5000) < p) < 0.03 < ece(p, y)


def test_auc_counts_ordered_pairs():
    assert auc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]) == pytest.approx(0.75)
    assert auc([0.5, 0.5], [0, 1]) == pytest.approx(0.5)
    assert np.isnan(auc([0.5, 0.6], [1, 1]))


def test_logit_is_finite_at_the_ends():
    assert np.all(np.isfinite(logit([0.0, 1.0])))


def two_witnesses(weights, n=6000, k=3, seed=0):
    """Blocks whose acceptance follows a confidence and another logit, in these proportions."""
    rng = np.random.default_rng(seed)
    x, u = rng.normal(0.0, 1.0, size=(2, n, k))
    hit = rng.random((n, k)) < sigmoid(weights[0] * x + weights[1] * u + weights[2])
    return sigmoid(x), u, np.cumprod(hit, axis=1).sum(axis=1), np.full(n, k)


@pytest.mark.parametrize("weights", [(0.4, 0.9, -0.2), (1.0, 0.0, 0.0), (0.9, 0.3, 0.5)])
def test_a_blend_finds_how_much_each_witness_is_worth(weights):
    found = blend(*two_witnesses(weights))
    for name, worth in zip(("slopes", "weights", "offsets"), weights, strict=True):
        assert getattr(found, name)[0] == pytest.approx(worth, abs=0.12), name
    confidence, u, accepted, _ = two_witnesses(weights, seed=1)
    both = found.apply(confidence, u)[:, 0]
    assert auc(both, accepted > 0) >= auc(confidence[:, 0], accepted > 0) - 0.01
    assert ece(both, accepted > 0) < 0.03
    assert log_loss(both, accepted > 0) <= log_loss(confidence[:, 0], accepted > 0) + 0.002


def test_neither_witness_counts_against_acceptance():
    found = blend(*two_witnesses((-0.8, -0.5, 0.3)))
    assert np.all(found.slopes == LEAST_SLOPE) and np.all(found.weights == 0.0)
    # What is rarely put to the test follows the position before it.
    confidence, u, accepted, reached = two_witnesses((0.2, 0.9, -3.0), n=800)
    found = blend(confidence, u, accepted, reached)
    assert found.weights[2] == found.weights[1] and found.weights[0] > 0.5
