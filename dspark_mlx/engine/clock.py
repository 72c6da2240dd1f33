"""Where a round's time went: waiting for the device, building the model's graph, or the host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal


class RoundClock:
    """Started when made. ``host`` is what is neither device wait nor the model's own call."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._model = 0.0
        self.draft = 0.0
        self.verify = 0.0
        self.total = 0.0
        self.syncs = 0

    @contextmanager
    def sync(self, stage: Literal["draft", "verify"]) -> Iterator[None]:
        """Around a wait for the device."""
        began = time.perf_counter()
        yield
        spent = time.perf_counter() - began
        self.syncs += 1
        if stage == "draft":
            self.draft += spent
        else:
            self.verify += spent

    @contextmanager
    def handover(self) -> Iterator[None]:
        """Around giving the device work ahead, which waits while its queue is full."""
        began = time.perf_counter()
        yield
        self.verify += time.perf_counter() - began

    @contextmanager
    def model(self) -> Iterator[None]:
        """Around a call of the model, which builds its graph and may wait for the queue."""
        began, waited = time.perf_counter(), self.verify
        yield
        self._model += time.perf_counter() - began - (self.verify - waited)

    def stop(self) -> None:
        self.total = time.perf_counter() - self._start

    @property
    def host(self) -> float:
        return max(0.0, self.total - self.draft - self.verify - self._model)


class PipelinedTime:
    """What one round cost, where each is dispatched before the one before it was read.

    With two rounds in the queue the first waits for most of the second, and the
    last is done before it is asked for: only their mean says what one costs.
    """

    def __init__(self) -> None:
        self._first = 0.0

    def of_round(self, taken: float, *, dispatched_early: bool, next_dispatched: bool) -> float:
        """Seconds to learn from, 0.0 for none, of a round that took ``taken`` seconds."""
        if next_dispatched and not dispatched_early:
            self._first = taken
            return 0.0
        if dispatched_early and not next_dispatched and self._first:
            taken, self._first = (self._first + taken) / 2, 0.0
        return taken
