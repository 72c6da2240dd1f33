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
        """Around a call of the model, which on a lazy backend only builds its graph."""
        began = time.perf_counter()
        yield
        self._model += time.perf_counter() - began

    def stop(self) -> None:
        self.total = time.perf_counter() - self._start

    @property
    def host(self) -> float:
        return max(0.0, self.total - self.draft - self.verify - self._model)
