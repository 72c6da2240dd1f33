"""Running acceptance rates, for proposers that have no confidence head."""

from __future__ import annotations

# Two imagined observations at this rate start every cell, so that the first real
# ones move it without swinging it.
PRIOR_RATE = 0.5
PRIOR_WEIGHT = 2.0
# Old observations fade: about the last 1 / (1 - DECAY) count.
DECAY = 0.97


class HitRate:
    """P(token k accepted | all before it were), by ``kind`` and position k."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], tuple[float, float]] = {}

    def rate(self, kind: int, position: int) -> float:
        hits, seen = self._cells.get((kind, position), (0.0, 0.0))
        return (hits + PRIOR_RATE * PRIOR_WEIGHT) / (seen + PRIOR_WEIGHT)

    def observe(self, kind: int, accepted: int, verified: int) -> None:
        """One draft of which ``verified`` tokens were checked and ``accepted`` stood."""
        for position in range(min(accepted + 1, verified)):
            hits, seen = self._cells.get((kind, position), (0.0, 0.0))
            hit = 1.0 if position < accepted else 0.0
            self._cells[kind, position] = (DECAY * hits + hit, DECAY * seen + 1.0)
