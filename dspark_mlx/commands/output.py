"""Files that commands write for the user."""

from __future__ import annotations

from pathlib import Path

from ..errors import UsageError


def write_text(path: Path, text: str) -> None:
    """Raises UsageError where it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
