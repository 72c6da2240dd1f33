"""How many drafted tokens to verify: policies, the cost and load they act on.

Pure throughout (numpy at most): no mlx, no clock, no I/O. Read ``policy`` (what a policy
is), ``cost`` and ``round_prices`` (what a round takes), ``acceptance`` (what a draft wins),
``limits`` (from one width to a schedule), then ``static``, ``paper`` and ``auto``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import UsageError
from ..request import Cuts
from .auto import Auto
from .cost import CostKey, CostModel
from .limits import stricter
from .paper import EarlyStop, Lagged
from .policy import Outcome, Plan, Policy, RowView, Schedule
from .static import Fixed, Off, Threshold

POLICIES = ("auto", "early-stop", "lagged", "fixed", "threshold", "off")

__all__ = [
    "POLICIES",
    "Auto",
    "CostKey",
    "CostModel",
    "EarlyStop",
    "Fixed",
    "Lagged",
    "Off",
    "Outcome",
    "Plan",
    "Policy",
    "RowView",
    "Schedule",
    "Threshold",
    "make_policy",
]


class _WithCuts:
    """A policy whose every row obeys the command line's cuts beside its own."""

    def __init__(self, policy: Policy, cuts: Cuts) -> None:
        self.name, self._policy, self._cuts = policy.name, policy, cuts

    def _rows(self, rows: Sequence[RowView]) -> tuple[RowView, ...]:
        return tuple(replace(row, cuts=stricter(row.cuts, self._cuts)) for row in rows)

    def plan(self, rows: Sequence[RowView]) -> Plan:
        return self._policy.plan(self._rows(rows))

    def schedule(
        self,
        rows: Sequence[RowView],
        drafted: Sequence[int],
        confidence: Sequence[Sequence[float]] | None,
    ) -> Schedule:
        return self._policy.schedule(self._rows(rows), drafted, confidence)

    def observe(self, outcome: Outcome) -> None:
        self._policy.observe(outcome)


def make_policy(
    name: str,
    *,
    cost: CostModel | None = None,
    draft_length: int | None = None,
    p_min: float = 0.0,
    p_survival_min: float = 0.0,
) -> Policy:
    """The policy that ``--schedule name`` means.

    ``cost`` is what was measured of this device; without it the policies that
    need prices learn them from their own rounds. ``draft_length``, ``p_min``
    and ``p_survival_min`` are the static cuts of the command line; they apply
    to every row beside the row's own.
    Raises UsageError for a name that does not exist or options it cannot honour.
    """
    cuts = Cuts(draft_length=draft_length, p_min=p_min, p_survival_min=p_survival_min)
    if name == "off":
        return Off()
    if name == "fixed":
        if cuts.needs_confidence:
            raise UsageError(
                "--schedule fixed reads no confidences",
                "drop --p-min and --p-survival-min or use --schedule threshold",
            )
        return Fixed(draft_length)
    if name == "threshold":
        return Threshold(cuts)
    policy: Policy
    if name == "auto":
        policy = Auto(cost)
    elif name == "early-stop":
        policy = EarlyStop(cost)
    elif name == "lagged":
        policy = Lagged(cost)
    else:
        raise UsageError(f"no schedule named {name!r}", f"choose one of {', '.join(POLICIES)}")
    return policy if cuts == Cuts() else _WithCuts(policy, cuts)
