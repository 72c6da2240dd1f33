"""Joules the processor has used, where the system lets an ordinary user read them.

Linux: the RAPL counters of powercap, readable for root on most distributions.
macOS tells only root (powermetrics).
"""

from __future__ import annotations

from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


def joules(root: Path = POWERCAP) -> float | None:
    """A running count over all packages; None where it cannot be read."""
    total, found = 0.0, False
    for zone in sorted(root.glob("*-rapl:*")):
        if zone.name.count(":") != 1:  # a part of a package, counted in it
            continue
        try:
            total += int((zone / "energy_uj").read_text()) / 1e6
        except (OSError, ValueError):
            return None
        found = True
    return total if found else None


def joules_since(before: float | None) -> float | None:
    """What ``joules`` has counted since it gave ``before``; None where that is not known."""
    after = joules()
    if before is None or after is None or after < before:  # the counter wraps now and then
        return None
    return after - before
