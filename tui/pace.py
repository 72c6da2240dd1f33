"""How often something is painted while it changes: no more often than is worth looking at."""

from __future__ import annotations

import time
from collections.abc import Callable

STRIP_SECONDS = 0.4  # read a word at a time
CHART_SECONDS = 1.0


class Pace:
    """Calls ``paint`` at most every ``seconds`` while there is news, the last of it included."""

    def __init__(self, seconds: float, paint: Callable[[], None]) -> None:
        self._seconds, self._paint = seconds, paint
        self._stale = False
        self._last = -seconds

    def beat(self, news: bool) -> None:
        self._stale = self._stale or news
        if self._stale and (now := time.monotonic()) - self._last >= self._seconds:
            self._stale, self._last = False, now
            self._paint()
