"""PeakRate: confidences from peaks follow what was accepted, and what depends on it is exact."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dspark_mlx.draft.rates import PEAK_EDGES, PeakRate, pool_adjacent_violators

Law = Callable[[float, int], float]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def calibration_error(rate: PeakRate, law: Law, seed: int) -> float:
    """Learn 400 verified tokens of ``law``, then measure over 800 more, bin by bin.

    The error is the mean over tokens of |mean confidence - mean law| of their bin.
    """
    rng = np.random.default_rng(seed)
    told, true, count = np.zeros(8), np.zeros(8), np.zeros(8)
    seen = 0
    while seen < 1200:
        table = rate.rates(False)
        for k in range(5):
            peak = float(rng.normal(1.2, 2.0))
            chance, i = law(peak, k), bisect_right(PEAK_EDGES, peak)
            hit = bool(rng.random() < chance)
            if seen >= 400:
                told[i] += table[k][i]
                true[i] += chance
                count[i] += 1
            rate.observe(peak, k, False, hit)
            seen += 1
            if not hit:
                break
    return float(np.abs(told - true).sum() / count.sum())


LAWS: dict[str, Law] = {
    "calibrated": lambda peak, k: sigmoid(peak),
    "over-confident": lambda peak, k: sigmoid(0.7 * peak - 1.0),
    "worse by slot": lambda peak, k: sigmoid(peak - 0.4 * k),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_law_is_learned_and_learned_again_when_it_changes(name: str) -> None:
    first, again = [], []
    for seed in range(8):
        rate = PeakRate()
        first.append(calibration_error(rate, LAWS[name], seed))
        again.append(calibration_error(rate, LAWS["over-confident"], seed + 50))
    assert np.mean(first) < 0.025
    assert np.mean(again) < 0.03


def test_a_flat_law_gives_flat_confidences() -> None:
    rate = PeakRate()
    before = np.ptp(rate.rates(False)[0])
    rng = np.random.default_rng(0)
    for _ in range(2000):
        rate.observe(float(rng.uniform(-3, 6)), 0, False, bool(rng.random() < 0.6))
    after = rate.rates(False)[0]
    assert np.ptp(after) < 0.3 < before
    assert np.mean(after) == pytest.approx(0.6, abs=0.06)


def test_nothing_is_learned_behind_a_rejection_or_of_other_rows() -> None:
    rate = PeakRate()
    start = rate.rates(True)
    rate.of_draft(mx.array([[1.5, 1.5, 1.5], [1.5, 1.5, 1.5]]), [True, False])
    rate.commit([3, 0], [1, 0])
    assert rate.rates(True) == start  # the sampled row verified nothing
    assert [cell[2] > 0 for cell in rate._slots[0][:3]] == [True, True, False]
    rate.of_draft(mx.zeros((2, 3)), [True, True])
    rate.forget()
    before = rate.rates(False)
    rate.commit([3], [3])
    assert rate.rates(False) == before


def test_confidences_on_the_device_are_the_table() -> None:
    rate = PeakRate()
    for k in range(40):
        rate.observe(2.5, k % 5, k % 2 == 0, k % 3 == 0)
    peaks = [[-9.0, -2.0, 0.5, 4.4, 4.5, 80.0] * 2] * 2
    ours: Any = rate.of_draft(mx.array(peaks), [True, False]).tolist()
    for r, sampled in enumerate((False, True)):
        table = rate.rates(sampled)
        for k, peak in enumerate(peaks[r]):
            want = table[min(k, 7)][bisect_right(PEAK_EDGES, peak)]
            assert ours[r][k] == pytest.approx(want, abs=1e-6)


def test_rates_never_fall_from_bin_to_bin() -> None:
    assert pool_adjacent_violators([0.1, 0.5, 0.3, 0.9], [1, 1, 3, 1]) == pytest.approx(
        [0.1, 0.35, 0.35, 0.9]
    )
    assert pool_adjacent_violators([3.0, 2.0, 1.0], [1, 1, 1]) == pytest.approx([2.0] * 3)
