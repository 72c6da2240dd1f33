"""Running acceptance rates: the confidence of proposers that have no confidence head."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

# Two imagined observations at this rate start every cell, so that the first real
# ones move it without swinging it.
PRIOR_RATE = 0.5
PRIOR_WEIGHT = 2.0
# Old observations fade: about the last 1 / (1 - DECAY) = 33 count, a few replies' lines.
DECAY = 0.97


class AcceptanceRate:
    """P(draft token k is accepted | all before it were), by position k."""

    def __init__(self) -> None:
        self._cells: list[tuple[float, float]] = []  # faded (accepted, observed) by position

    def rates(self, count: int) -> list[float]:
        """Of positions 0..``count``-1; one seldom observed is taken to be like the one before."""
        rates, prior = [], PRIOR_RATE
        for k in range(count):
            accepted, seen = self._cells[k] if k < len(self._cells) else (0.0, 0.0)
            prior = (accepted + prior * PRIOR_WEIGHT) / (seen + PRIOR_WEIGHT)
            rates.append(prior)
        return rates

    def observe(self, accepted: int, verified: int) -> None:
        """One draft of which ``verified`` tokens were checked and ``accepted`` were right."""
        for k in range(min(accepted + 1, verified)):
            if k == len(self._cells):
                self._cells.append((0.0, 0.0))
            hits, seen = self._cells[k]
            self._cells[k] = (DECAY * hits + (k < accepted), DECAY * seen + 1.0)


# Where one bin of peak logits ends and the next begins; a probability of 0.12, 0.27, 0.5, ... 0.99.
PEAK_EDGES = (-2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.5)
PEAK_SLOTS = 8  # slots with cells of their own; later ones share those of the last
PEAK_WEIGHT = 4.0  # imagined observations a cell starts with
PEAK_DECAY = 0.98  # about the last 50 tokens of each bin count: it is seen less often than a slot
_CENTRES = (-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.75, 5.5)  # of the bins, for their own probabilities


class PeakRate:
    """P(draft token k is accepted | all before it were), by how peaked slot k was.

    The confidence of drafters without a confidence head. A slot's peak is the logit of
    its largest probability; it depends on the tokens before the slot's own only. Peaks
    are sorted into bins, and acceptance is counted by (greedy or sampled, bin). A bin
    starts from its own probability, which a calibrated drafter would have, and rates
    never fall from one bin to the next (``pool_adjacent_violators``). What is left
    between slots is one factor per slot on the odds: accepted over expected.
    """

    def __init__(self) -> None:
        # [sampled][bin] faded (accepted, observed); [sampled][slot] (accepted, expected, observed).
        self._bins = [[(0.0, 0.0)] * len(_CENTRES) for _ in ("greedy", "sampled")]
        self._slots = [[(0.0, 0.0, 0.0)] * PEAK_SLOTS for _ in ("greedy", "sampled")]
        self._table: mx.array | None = None
        self._drafted: tuple[mx.array, list[bool]] | None = None

    # -- a round: the confidences of a draft, and what became of it ------------------------

    def of_draft(self, peaks: mx.array, greedy: Sequence[bool]) -> mx.array:
        """Confidences ``(B, w)`` of slots with ``peaks (B, w)``; lazy. ``commit`` must follow."""
        self._drafted = peaks, list(greedy)
        if self._table is None:
            self._table = mx.array([self.rates(sampled) for sampled in (False, True)])
        # (B, w, 1) against the edges: the number of edges below a peak is its bin.
        bins = (peaks[..., None] >= mx.array(PEAK_EDGES)).sum(axis=-1)
        mode = mx.array([int(not g) for g in greedy])[:, None]
        slot = mx.minimum(mx.arange(peaks.shape[1]), PEAK_SLOTS - 1)[None]
        return self._table[mode, slot, bins]

    @property
    def arrays(self) -> list[mx.array]:
        """What ``commit`` will read, to be evaluated with the round."""
        return [] if self._drafted is None else [self._drafted[0]]

    def forget(self) -> None:
        """The rows changed: the last draft is nobody's."""
        self._drafted = None

    def commit(self, verified: Sequence[int], accepted: Sequence[int]) -> None:
        """Of row r's draft ``verified[r]`` tokens were checked and ``accepted[r]`` were right."""
        drafted, self._drafted = self._drafted, None
        if drafted is None or not any(verified):
            return
        peaks: Any = drafted[0].tolist()
        for row, greedy, checked, right in zip(peaks, drafted[1], verified, accepted, strict=True):
            for k in range(min(right + 1, checked)):
                self.observe(row[k], k, not greedy, k < right)

    # -- the counts ------------------------------------------------------------------------

    def observe(self, peak: float, slot: int, sampled: bool, hit: bool) -> None:
        """One verified token; tokens behind a rejected one say nothing."""
        i, slot = bisect_right(PEAK_EDGES, peak), min(slot, PEAK_SLOTS - 1)
        expected = self._of_bins(sampled)[i]
        hits, seen = self._bins[sampled][i]
        self._bins[sampled][i] = (PEAK_DECAY * hits + hit, PEAK_DECAY * seen + 1.0)
        was = self._slots[sampled][slot]
        now = (float(hit), expected, 1.0)
        right, awaited, count = (PEAK_DECAY * a + b for a, b in zip(was, now, strict=True))
        self._slots[sampled][slot] = (right, awaited, count)
        self._table = None

    def rates(self, sampled: bool) -> list[list[float]]:
        """The rate of each slot (of ``PEAK_SLOTS``) and bin."""
        bins = self._of_bins(sampled)
        rates = []
        for hits, expected, seen in self._slots[sampled]:
            odds = (hits + PEAK_WEIGHT) / (expected + PEAK_WEIGHT)
            odds *= (seen - expected + PEAK_WEIGHT) / (seen - hits + PEAK_WEIGHT)
            rates.append([p * odds / (p * odds + 1 - p) for p in bins])
        return rates

    def _of_bins(self, sampled: bool) -> list[float]:
        own = [1.0 / (1.0 + math.exp(-c)) for c in _CENTRES]
        cells = self._bins[sampled]
        weights = [seen + PEAK_WEIGHT for _, seen in cells]
        means = [
            (hits + PEAK_WEIGHT * p) / w
            for (hits, _), p, w in zip(cells, own, weights, strict=True)
        ]
        return pool_adjacent_violators(means, weights)


def pool_adjacent_violators(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nondecreasing sequence next to ``values`` by weighted squares."""
    pools: list[tuple[float, float, int]] = []  # (mean, weight, members)
    for value, weight in zip(values, weights, strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (b, wb, nb), (a, wa, na) = pools.pop(), pools.pop()
            pools.append(((a * wa + b * wb) / (wa + wb), wa + wb, na + nb))
    return [mean for mean, _, members in pools for _ in range(members)]


class MatchRate:
    """P(the next token is the one that followed before), by how many tokens before it match.

    Before anything is observed a match of n tokens counts as n hits and one miss: the
    more of the text has repeated, the likelier it goes on to.
    """

    def __init__(self, lengths: Sequence[int] = (2, 3, 4, 5, 8, 12)) -> None:
        """``lengths``, ascending: where one group of matches ends and the next begins."""
        self._lengths = tuple(lengths)
        self._cells = [(0.0, 0.0)] * len(self._lengths)

    def rate(self, length: int) -> float:
        i = self._group(length)
        hits, seen = self._cells[i]
        n = self._lengths[i]
        return (hits + PRIOR_WEIGHT * n / (n + 1)) / (seen + PRIOR_WEIGHT)

    def observe(self, length: int, hit: bool) -> None:
        i = self._group(length)
        hits, seen = self._cells[i]
        self._cells[i] = (DECAY * hits + hit, DECAY * seen + 1.0)

    def _group(self, length: int) -> int:
        return max(bisect_right(self._lengths, length) - 1, 0)
