"""A run on disk: one event a line, written as it happens, read back for replay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

from .errors import UsageError
from .events import Event, StepDone, from_json, to_json


class TraceWriter:
    """Appends events to a new file; each line is complete once written.

    Where writing fails later (a full disk), ``write`` and ``close`` raise
    OSError with the file's name, once.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        try:
            self._file = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        except OSError as error:
            raise UsageError(f"cannot write the trace {path}: {error.strerror}") from error

    def write(self, events: Iterable[Event]) -> None:
        try:
            for event in events:
                self._file.write(to_json(event) + "\n")
        except OSError as error:
            with contextlib.suppress(OSError):  # it tries once more to write what is left
                self._file.close()
            raise self._named(error) from error

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise self._named(error) from error

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self._path))

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _checked(event: Event) -> Event:
    """Raises ValueError, or TypeError for what is no number, for a round that cannot have been."""
    if isinstance(event, StepDone):
        spans = (event.round_seconds, event.draft_seconds, event.verify_seconds, event.host_seconds)
        rows = all(0 <= r.accepted <= r.scheduled <= len(r.drafted) for r in event.rows)
        if not rows or min(spans) < 0 or any(r.position < 0 for r in event.rows):
            raise ValueError
    return event


def read_trace(path: str | Path) -> Iterator[Event]:
    """The events of a trace, oldest first. Raises UsageError that names the bad line.

    A last line without its newline was cut off when the writer was killed; it
    is left out.
    """
    try:
        with Path(path).open("rb") as file:  # a cut may lie inside a character
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    yield _checked(from_json(line.decode("utf-8")))
                except (ValueError, TypeError):
                    if not line.endswith(b"\n"):
                        return
                    raise UsageError(
                        f"{path}, line {number}: no event of the engine, so this is not a trace",
                        "give a file that `dspark-chat --trace FILE` wrote",
                    ) from None
    except OSError as error:
        raise UsageError(f"cannot read the trace {path}: {error}") from error
