"""What commands read from the user and write for them, standard streams included."""

from __future__ import annotations

import contextlib
import os
import sys
from io import TextIOWrapper
from pathlib import Path

from ..errors import UsageError


def prepare_streams() -> None:
    """Text that the terminal's encoding lacks is shown as escapes instead of failing."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def abandon_stdout() -> None:
    """Flush what can be written; the rest must not fail again when the interpreter exits."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: a stand-in without a descriptor
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """Print a line on stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def read_stdin() -> str:
    """Standard input as text. Raises UsageError where there is none or it is not text."""
    if sys.stdin is None:
        raise UsageError("standard input is closed", "give the text with --prompt")
    raw = getattr(sys.stdin, "buffer", None)
    try:  # whatever the locale says: it is UTF-8 or it is refused
        return raw.read().decode() if raw else sys.stdin.read()
    except UnicodeDecodeError:
        raise UsageError("standard input is not text", "pipe UTF-8 text") from None


def write_text(path: Path, text: str) -> None:
    """Write the file, whole or not at all. Raises UsageError where it cannot be written."""
    from ..files import write_atomically

    try:
        if path.is_file() or not path.exists():
            write_atomically(path, text)
        else:  # a pipe or a device cannot be replaced
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def check_writable(path: Path | None) -> None:
    """Raise UsageError, before long work, where ``write_text`` would raise it after it."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"cannot write {path}: no permission")
