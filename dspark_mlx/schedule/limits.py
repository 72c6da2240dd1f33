"""From one width to a schedule: cuts, padding, and the line that says why.

A row's static ``Cuts`` shorten its draft. Rows of a step are padded to the widest, so
every policy that prices rounds comes down to one width W, and each row verifies as much
of it as its own limits allow. Owns that arithmetic and the reasons; never the choice of W.

A cut at position k reads c_1..c_k and nothing drawn at or after k, so it is
non-anticipating as long as the proposer's c_k is a function of the tokens before x_k.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from ..request import Cuts
from .policy import Floats, RowView, Schedule

Limits: TypeAlias = Sequence[tuple[int, str]]  # per row: most tokens to verify, and why


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


def any_needs_confidence(rows: Sequence[RowView]) -> bool:
    """Whether some row's cuts need its confidences before verification."""
    return any(row.cuts.needs_confidence and row.cap > 0 for row in rows)


def limit(
    row: RowView, drafted: int, confidence: Sequence[float] | None, cuts: Cuts | None = None
) -> tuple[int, str]:
    """Most of the ``drafted`` tokens that ``row`` may verify, and what limits it.

    ``confidence`` is the row's c_k, one per drafted token; empty or None when
    there is none: then only the caps on length apply, and the reason says so.
    ``cuts`` replaces the row's own.
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
    if not cuts.needs_confidence or length == 0:
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


def unpriced(limits: Limits, policy: str = "") -> Schedule:
    """Every row verifies all that its own limits allow; nothing is known of prices."""
    return Schedule(
        lengths=tuple(length for length, _ in limits),
        reasons=tuple(why for _, why in limits),
        policy=policy,
    )


def marginal_gains(confidence: Floats, limits: Limits) -> Floats:
    """Σ_r a_{r,k} for k = 1..K ``(K,)``: what verifying one position more wins.

    a_{r,k} = c_{r,1} · … · c_{r,k} from calibrated ``confidence (R, K)``; 0 beyond what a
    row may verify, K the most that any may.
    """
    lengths = [length for length, _ in limits]
    most = max(lengths, default=0)
    survival = np.multiply.accumulate(confidence[:, :most], axis=1)
    if min(lengths, default=0) < most:
        for r, length in enumerate(lengths):
            survival[r, length:] = 0.0
    return np.asarray(np.add.reduce(survival, axis=0))


def cumulative(marginal: Floats) -> Floats:
    """Tokens won by each width 0..K ``(K + 1,)``, from ``marginal (K,)``."""
    gains = np.zeros(len(marginal) + 1)
    np.add.accumulate(marginal, out=gains[1:])
    return gains


def padded(
    gains: Floats,
    seconds: Floats,
    width: int,
    limits: Limits,
    policy: str = "",
    reason: str = "",
) -> Schedule:
    """Every row verified up to ``width``, as far as its own ``limits`` allow.

    ``gains[W]`` are the tokens that all rows together win at each width W,
    ``seconds[W]`` the round; both ``(K + 1,)`` with ``width`` <= K. ``reason`` takes
    the place of the line made from these numbers.
    """
    curve = tuple(((len(limits) + gains) / seconds).tolist())
    if not reason:
        more = len(seconds) - 1 - width
        cost, won = 1e3 * float(seconds[-1] - seconds[width]), float(gains[-1] - gains[width])
        cut = f"verifying {more} more would cost {cost:.1f} ms for {won:.2f} expected tokens"
    else:
        cut = reason
    return Schedule(
        lengths=tuple([min(width, length) for length, _ in limits]),
        reasons=tuple(
            [
                cut if width < length or (reason and length) else _whole(length, why, width)
                for length, why in limits
            ]
        ),
        curves=tuple([curve[: length + 1] for length, _ in limits]),
        predicted_seconds=float(seconds[width]),
        predicted_tps=curve[width],
        policy=policy,
    )


def _whole(length: int, why: str, width: int) -> str:
    """Why a row verifies all that its own limits allow."""
    return why if length == width or not length else f"{why}; another row is verified to {width}"
