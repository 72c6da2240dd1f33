"""Policies for the profile alone: one kind of round and another in turns.

So that a drift of the clock speed cancels out of what the one saves or costs: a plain
round that is begun before the last was read, a drafted one whose confidences are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median

from ..schedule import Fixed, Off, Outcome, Plan, RowView, Schedule
from ..schedule.honesty import Honesty
from .fit import typical

TURN = 4  # rounds of a kind in a row; the first of each is not counted


class Turns(Off):
    """Plain rounds, some one after the other, then as many begun ahead, and so on.

    ``saved`` says what the overlapping ones were faster by.
    """

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


class Looks(Fixed):
    """Whole blocks, verified with a look at their confidences and without, two and two.

    ``price`` says what a look adds: the device waits for the host to read and decide.
    """

    def __init__(self) -> None:
        super().__init__()
        self._round = 0
        self._honesty = Honesty()
        self._seconds: tuple[list[float], list[float]] = ([], [])  # blind, looked

    def plan(self, rows: Sequence[RowView]) -> Plan:
        plan = super().plan(rows)
        look = any(plan.widths) and (self._round + 1) // 2 % 2 == 1
        return dataclasses.replace(plan, look=look)

    def schedule(
        self,
        rows: Sequence[RowView],
        drafted: Sequence[int],
        confidence: Sequence[Sequence[float]] | None,
    ) -> Schedule:
        if confidence is not None:
            self._honesty.correct(rows, drafted, confidence)  # who looks will reckon with it
        return super().schedule(rows, drafted, confidence)

    def observe(self, outcome: Outcome) -> None:
        if self._round:  # the first was a warm-up
            self._seconds[outcome.draft_seconds > 0.0].append(outcome.round_seconds)
        self._round += 1

    @property
    def price(self) -> float:
        """Seconds, at least 0."""
        blind, looked = self._seconds
        return max(0.0, typical(looked) - typical(blind)) if blind and looked else 0.0
