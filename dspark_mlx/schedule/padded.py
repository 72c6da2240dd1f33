"""Rows verified up to one width: the schedule of a padded batch.

In a padded step the widest row is paid for by all, so every policy that prices
rounds comes down to one width W, and each row verifies as much of it as its own
limits allow. Owns what follows from W (lengths, reasons, curves, prediction),
and the survivals a look gives to choose it by; never the choice.
"""

from __future__ import annotations

import numpy as np

from .calibration import Floats
from .cuts import Limits
from .policy import Schedule
from .reasons import kept, trimmed


def survivals(honest: Floats, limits: Limits) -> Floats:
    """a_{r,k} ``(R, K)`` from honest c_{r,k}; 0 beyond what each row may verify."""
    survival = np.multiply.accumulate(honest, axis=1)
    most = np.array([length for length, _ in limits])
    return np.asarray(np.where(np.arange(honest.shape[1]) < most[:, None], survival, 0.0))


def gains_of(marginal: Floats) -> Floats:
    """Expected tokens won by verifying 0..K ``(K + 1,)``, from each level's total survival."""
    gains = np.zeros(len(marginal) + 1)
    marginal.cumsum(out=gains[1:])
    return gains


def padded(
    gains: Floats, seconds: Floats, width: int, limits: Limits, policy: str = ""
) -> Schedule:
    """Every row verified up to ``width``, as far as its own ``limits`` allow.

    ``gains[W]`` are the tokens that all rows together win at each width,
    ``seconds[W]`` the round; both ``(K + 1,)`` with ``width`` <= K.
    """
    curve = tuple(((len(limits) + gains) / seconds).tolist())
    cut = trimmed(gains, seconds, width)
    return Schedule(
        lengths=tuple([min(width, length) for length, _ in limits]),
        reasons=tuple(
            [cut if width < length else kept(length, why, width) for length, why in limits]
        ),
        curves=tuple([curve[: length + 1] for length, _ in limits]),
        predicted_seconds=float(seconds[width]),
        predicted_tps=curve[width],
        policy=policy,
    )
