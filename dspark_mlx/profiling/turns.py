"""What a plain round saves where it is begun before the last was read.

A policy for the profile alone: it decodes plainly, some rounds one after the other,
then as many begun ahead, and so on, so that a drift of the clock speed cancels out.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ..schedule import Off, Outcome, Plan, RowView

TURN = 4  # rounds of a kind in a row; the first of each is not counted


class Turns(Off):
    """Plain rounds in turns; ``saved`` says what the overlapping ones were faster by."""

    def __init__(self) -> None:
        self._round = 0
        self._seconds: tuple[list[float], list[float]] = ([], [])  # alone, begun ahead

    def plan(self, rows: Sequence[RowView]) -> Plan:
        ahead = TURN - 1 if self._round // TURN % 2 else 0
        return Plan(widths=(0,) * len(rows), look=False, plain_ahead=ahead)

    def observe(self, outcome: Outcome) -> None:
        if self._round % TURN and outcome.round_seconds > 0.0:
            self._seconds[outcome.overlapped].append(outcome.round_seconds)
        self._round += 1

    @property
    def saved(self) -> float:
        """Seconds, at least 0."""
        alone, ahead = self._seconds
        return max(0.0, median(alone) - median(ahead)) if alone and ahead else 0.0
