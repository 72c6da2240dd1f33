"""How busy the device is, from what is measured rather than guessed.

``slowdown`` is measured over predicted round time, as a fast average (a few
rounds) and a slow one (a minute or so of rounds). What the operating system
knows (host load, memory pressure, heat) comes through callables given by the
caller, so that this module stays pure, and is asked only now and then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..events import Load

FAST = 4.0  # rounds over which the fast average forgets 1 - 1/e
SLOW = 200.0
LIMIT = 16.0  # one round this many times too slow counts no more than that
EVERY = 2.0  # seconds between questions to the system


@dataclass(frozen=True, slots=True)
class Host:
    """The system's own view; None where it cannot be read.

    ``load`` is the share of all processors in use, ``memory`` the share of
    memory that is not available, both 0 to 1; ``thermal`` is ``nominal`` or
    the system's word for what limits it.
    """

    load: float | None = None
    memory: float | None = None
    thermal: str | None = None


def nothing_known() -> Host:
    return Host()


class LoadMonitor:
    """``round`` after each round; ``load`` for the event. ``clock`` gives seconds."""

    def __init__(
        self, host: Callable[[], Host] = nothing_known, clock: Callable[[], float] | None = None
    ) -> None:
        self._ask, self._clock = host, clock
        self._host, self._asked = Host(), -math.inf
        self._fast = self._slow = 0.0
        self._rounds = 0

    def round(self, predicted: float | None, measured: float) -> None:
        """One round's prediction (None: there was none) and what it took, in seconds."""
        if predicted is None or not (predicted > 0.0 and measured > 0.0):
            return
        ratio = min(max(math.log(measured / predicted), -math.log(LIMIT)), math.log(LIMIT))
        self._rounds += 1
        self._fast += (ratio - self._fast) * max(1.0 / FAST, 1.0 / self._rounds)
        self._slow += (ratio - self._slow) * max(1.0 / SLOW, 1.0 / self._rounds)

    def load(self, active: int, queued: int) -> Load:
        if self._clock is not None and self._clock() - self._asked >= EVERY:
            self._asked = self._clock()
            self._host = self._ask()
        return Load(
            active=active,
            queued=queued,
            slowdown_fast=math.exp(self._fast),
            slowdown_slow=math.exp(self._slow),
            host=self._host.load,
            memory_pressure=self._host.memory,
            thermal=self._host.thermal,
        )
