"""The one line that says why a row verifies as many tokens as it does.

Made from the numbers the decision was made with, and nothing else. Of a batch
the numbers are those of all rows together, since one width is chosen for all.
"""

from __future__ import annotations

from .calibration import Floats
from .cuts import Limits, tokens
from .policy import Schedule


def trimmed(gains: Floats, seconds: Floats, width: int) -> str:
    """Why not more than ``width``, of ``len(seconds) - 1`` that could be."""
    more = len(seconds) - 1 - width
    if more < 1:
        return ""
    cost = 1e3 * float(seconds[-1] - seconds[width])
    won = float(gains[-1] - gains[width])
    return f"verifying {more} more would cost {cost:.1f} ms for {won:.2f} expected tokens"


def kept(length: int, why: str, width: int) -> str:
    """Why a row verifies all that its own limits allow."""
    return why if length == width or not length else f"{why}; another row is verified to {width}"


def plain(draft: int, seconds: float, saved: float, won: float) -> str:
    """Why nothing is drafted: drafting ``draft`` would take longer than it wins."""
    extra = 1e3 * (seconds - saved)
    cost = f"{extra:.1f} ms for {won:.2f} expected tokens"
    return f"decoding plainly: drafting {draft} would cost {cost}"


def unpriced(limits: Limits, policy: str = "") -> Schedule:
    """Without a measured cost nothing is trimmed beyond what each row's own limits say."""
    return Schedule(
        lengths=tuple(length for length, _ in limits),
        reasons=tuple(why for _, why in limits),
        policy=policy,
    )


def copied(length: int, width: int, seconds: float, expected: float) -> str:
    """Why a row verifies what followed when the same tokens occurred before."""
    what = f"{tokens(length)} copied from above"
    if length < width:
        what += f", another row verifies {width}"
    return f"{what}: {expected:.2f} expected tokens in {1e3 * seconds:.0f} ms"


def chosen(width: int, seconds: float, expected: float) -> str:
    """Why a row drafts and verifies ``width``, settled before its draft was made."""
    return (
        f"{tokens(width)} {'pays' if width == 1 else 'pay'} best by recent rounds: "
        f"{expected:.2f} expected tokens in {1e3 * seconds:.0f} ms"
    )
