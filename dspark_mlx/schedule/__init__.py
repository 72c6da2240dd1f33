"""How many drafted tokens to verify: policies, the cost and load they act on.

Pure throughout (numpy at most): no mlx, no clock, no I/O.
"""

from __future__ import annotations

from ..errors import UsageError
from ..request import Cuts
from .policy import Outcome, Plan, Policy, RowView, Schedule
from .static import Fixed, Off, Threshold

POLICIES = ("off", "fixed", "threshold")

__all__ = [
    "POLICIES",
    "Fixed",
    "Off",
    "Outcome",
    "Plan",
    "Policy",
    "RowView",
    "Schedule",
    "Threshold",
    "make_policy",
]


def make_policy(
    name: str,
    *,
    draft_length: int | None = None,
    p_min: float = 0.0,
    p_survival_min: float = 0.0,
) -> Policy:
    """The policy that ``--schedule name`` means.

    ``draft_length``, ``p_min`` and ``p_survival_min`` are the static cuts of the
    command line; they apply to every row beside the row's own.
    Raises UsageError for a name that does not exist or options it cannot honour.
    """
    cuts = Cuts(draft_length=draft_length, p_min=p_min, p_survival_min=p_survival_min)
    if name == "off":
        return Off()
    if name == "fixed":
        if cuts.look:
            raise UsageError(
                "--schedule fixed reads no confidences",
                "drop --p-min and --p-survival-min or use --schedule threshold",
            )
        return Fixed(draft_length)
    if name == "threshold":
        return Threshold(cuts)
    raise UsageError(f"no schedule named {name!r}", f"choose one of {', '.join(POLICIES)}")
