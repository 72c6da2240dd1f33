"""One line on stderr that follows a long task; nothing where stderr is no terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from ..events import CostTable, Loading, Notice

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

_WORDS = {
    "download": "fetching",
    "convert": "converting",
    "load": "loading",
    "check": "checking",
    "profile": "measuring",
}
_REDRAW_SECONDS = 0.1


class ProgressLine:
    """Call it with the events of loading, or ``show`` a text of your own, inside a ``with``.

    The line is drawn by ``rich`` and cleared at the end of the ``with`` block.
    """

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._drawn_at = 0.0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.clear()

    def __call__(self, event: Loading | Notice | CostTable) -> None:
        if not isinstance(event, Loading):
            return
        line = f"{_WORDS.get(event.stage, event.stage)} {event.detail}"
        if event.stage == "download" and event.total:
            line += f"  {event.done / 1e6:,.0f} of {event.total / 1e6:,.0f} MB"
        share = event.stage in ("download", "profile", "convert")
        self.show(line, event.done if share else 0, event.total if share else 0)

    def show(self, line: str, done: float = 0, total: float = 0) -> None:
        """Draw ``line``, with a bar where a ``total`` is known."""
        now = time.monotonic()
        last = total and done >= total
        if not sys.stderr.isatty() or (now - self._drawn_at < _REDRAW_SECONDS and not last):
            return
        self._drawn_at = now
        if self._progress is None:
            self._progress = _start()
        self._progress.columns = _columns(bar=bool(total))
        task = self._progress.task_ids[0]
        self._progress.update(
            task, description=line, completed=done, total=total or None, refresh=True
        )

    def clear(self) -> None:
        """Take the line away, for other text to be written."""
        if self._progress is not None:
            self._progress.stop()
            self._progress, self._drawn_at = None, 0.0


def _columns(bar: bool) -> tuple[ProgressColumn, ...]:
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn

    text = TextColumn("{task.description}", markup=False)
    return (text, BarColumn(), TaskProgressColumn()) if bar else (text,)


def _start() -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    progress = Progress(
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    progress.columns = ()
    progress.add_task("", total=None)
    progress.start()
    return progress
