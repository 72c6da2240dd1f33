"""Running acceptance rates: the confidence of proposers that have no confidence head."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

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
