"""Policies that know nothing of cost: ``off``, ``fixed`` and ``threshold``.

They draft and verify what their limits say and learn nothing from outcomes. Each
row's own ``Cuts`` apply as well; where both speak, the stricter one holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UsageError
from ..request import Cuts
from .limits import any_needs_confidence, limits, unpriced
from .policy import Outcome, Plan, RowView, Schedule


class Off:
    """Plain decoding: nothing is drafted."""

    name = "off"

    def plan(self, rows: Sequence[RowView]) -> Plan:
        return Plan((0,) * len(rows), needs_confidence=False)

    def schedule(
        self,
        rows: Sequence[RowView],
        drafted: Sequence[int],
        confidence: Sequence[Sequence[float]] | None,
    ) -> Schedule:
        return Schedule(lengths=(0,) * len(rows), reasons=("speculation is off",) * len(rows))

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn."""


class Threshold:
    """Verify until a confidence, or the running survival, falls below a limit."""

    name = "threshold"

    def __init__(self, cuts: Cuts) -> None:
        self.cuts = cuts

    def plan(self, rows: Sequence[RowView]) -> Plan:
        most = self.cuts.draft_length
        widths = tuple(row.cap if most is None else min(row.cap, most) for row in rows)
        needs = any(widths) and (self.cuts.needs_confidence or any_needs_confidence(rows))
        return Plan(widths, needs)

    def schedule(
        self,
        rows: Sequence[RowView],
        drafted: Sequence[int],
        confidence: Sequence[Sequence[float]] | None,
    ) -> Schedule:
        return unpriced(limits(rows, drafted, confidence, self.cuts))

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn: static limits stay as they were given."""


class Fixed(Threshold):
    """Verify the same number of tokens every round (None: the whole block)."""

    name = "fixed"

    def __init__(self, draft_length: int | None = None) -> None:
        if draft_length is not None and draft_length < 0:
            raise UsageError("draft length must be 0 or more")
        super().__init__(Cuts(draft_length=draft_length))
