"""How a row's static ``Cuts`` shorten a draft; every policy obeys them.

Owns only that arithmetic. A cut at position k reads c_1..c_k and nothing drawn
at or after k, so it is non-anticipating as long as the proposer's c_k is a
function of the tokens before x_k.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..request import Cuts
from .policy import RowView

Limits = Sequence[tuple[int, str]]  # per row: most tokens it may verify, and what limits it


def tokens(n: int) -> str:
    return "1 token" if n == 1 else f"{n} tokens"


@functools.cache
def _all(drafted: int) -> str:
    return f"all {tokens(drafted)} drafted" if drafted else "nothing drafted"


def stricter(a: Cuts, b: Cuts) -> Cuts:
    """The cuts that satisfy both ``a`` and ``b``."""
    lengths = [c.draft_length for c in (a, b) if c.draft_length is not None]
    return Cuts(
        draft_length=min(lengths) if lengths else None,
        p_min=max(a.p_min, b.p_min),
        p_survival_min=max(a.p_survival_min, b.p_survival_min),
    )


def any_looks(rows: Sequence[RowView]) -> bool:
    """Whether some row's cuts need its confidences before verification."""
    return any(row.cuts.look and row.cap > 0 for row in rows)


def limit(
    row: RowView, drafted: int, confidence: Sequence[float] | None, cuts: Cuts | None = None
) -> tuple[int, str]:
    """Most of the ``drafted`` tokens that ``row`` may verify, and what limits it.

    ``confidence`` is the row's c_k, one per drafted token; empty or None when
    there is none, in which case only the caps on length can be applied and the
    reason says so. ``cuts`` replaces the row's own.
    """
    cuts = row.cuts if cuts is None else cuts
    length = min(drafted, row.cap)
    if cuts.draft_length is not None:
        length = min(length, cuts.draft_length)
    if length == drafted:
        reason = _all(drafted)
    elif length == row.remaining - 1:
        reason = f"the reply may take {tokens(row.remaining)} more"
    else:
        reason = f"draft length limited to {length}"
    if not cuts.look or length == 0:
        return length, reason
    if not confidence:
        return length, f"{reason}; no confidence to cut by"
    survival = 1.0
    for k in range(min(length, len(confidence))):
        c = confidence[k]
        survival *= c
        if c < cuts.p_min:
            return k, f"confidence {c:.2f} of token {k + 1} is below {cuts.p_min:g}"
        if survival < cuts.p_survival_min:
            return k, f"survival {survival:.2f} of token {k + 1} is below {cuts.p_survival_min:g}"
    return length, reason


def limits(
    rows: Sequence[RowView],
    drafted: Sequence[int],
    confidence: Sequence[Sequence[float]] | None,
    cuts: Cuts | None = None,
) -> list[tuple[int, str]]:
    """``limit`` of every row; ``cuts`` apply to all of them beside each row's own."""
    return [
        limit(
            row,
            drafted[r],
            confidence[r] if confidence else None,
            None if cuts is None else stricter(cuts, row.cuts),
        )
        for r, row in enumerate(rows)
    ]
