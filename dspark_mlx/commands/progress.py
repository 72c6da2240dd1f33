"""One line on stderr that follows what takes long; silent where nobody looks."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from ..events import Loading

_WORDS = {
    "download": "fetching",
    "convert": "converting",
    "load": "loading",
    "profile": "measuring",
}
_REDRAW_SECONDS = 0.1


class ProgressLine:
    """Call it with Loading events, inside a ``with`` that clears the line at the end."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._drawn_at = 0.0
        self._dirty = False

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._dirty:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __call__(self, event: Loading) -> None:
        line = f"{_WORDS.get(event.stage, event.stage)} {event.detail}"
        if event.stage == "download" and event.total:
            percent = 100 * event.done // event.total
            line += f"  {event.done / 1e6:,.0f} of {event.total / 1e6:,.0f} MB ({percent} %)"
        if event.stage == "profile" and event.total:
            line += f"  {100 * event.done // event.total} %"
        self.show(line, last=event.done >= event.total)

    def show(self, line: str, *, last: bool = False) -> None:
        """Any other line; ``last`` is drawn however soon it follows another."""
        now = time.monotonic()
        if not self._shown or (now - self._drawn_at < _REDRAW_SECONDS and not last):
            return
        self._drawn_at, self._dirty = now, True
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
