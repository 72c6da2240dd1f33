"""The cache folder: where converted models live, and how they get there whole.

A folder is built beside its final name and renamed into place, under a lock. So it
is complete or does not exist, and two processes never build it at once. This module
does not know what the folders hold.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import platformdirs

from ..errors import DownloadError, DsparkError
from ..events import Loading

Report: TypeAlias = Callable[[Loading], None]
POLL_SECONDS = 0.2


class Cancelled(DsparkError):
    """The caller set its ``cancel`` event; nothing half-made is left behind."""

    def __init__(self) -> None:
        super().__init__("cancelled")


def silent(_: Loading) -> None:
    """Ignore a progress event: the report function of callers that show none."""


def check_cancel(cancel: threading.Event | None) -> None:
    if cancel is not None and cancel.is_set():
        raise Cancelled


def default_cache_dir() -> Path:
    """``~/.cache/dspark-mlx`` (XDG_CACHE_HOME is honoured) or ``~/Library/Caches/dspark-mlx``."""
    return Path(platformdirs.user_cache_dir("dspark-mlx", appauthor=False))


def check_space(folder: Path, need: int) -> None:
    """Raise DownloadError unless ``need`` bytes are free where ``folder`` is or will be."""
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if need > free:
        raise DownloadError(
            f"not enough room on the disk: {need / 1e9:.1f} GB are needed in {existing} "
            f"and {free / 1e9:.1f} GB are free",
            "make room, or give another folder with --cache-dir",
        )


def disk_error(error: OSError, folder: Path) -> DownloadError:
    """One clear line for a disk that is full, or that this user may not write to."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    what = "the disk is full" if full else f"cannot write: {error.strerror or error}"
    return DownloadError(f"{what} ({folder})", "make room, or give another folder with --cache-dir")


def build_folder(
    final: Path, build: Callable[[Path], None], *, cancel: threading.Event | None = None
) -> Path:
    """Return the folder ``final``; make it with ``build(staging folder)`` if it does not exist.

    If ``build`` ends early (an error, Ctrl+C), the staging folder is removed. The
    next process removes the one of a process that was killed.
    """
    if final.is_dir():
        return final
    prefix = f".{final.name}-"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with locked(final.parent / f".{final.name}.lock", cancel):
            if final.is_dir():  # another process made it while this one waited
                return final
            for leftover in final.parent.glob(f"{prefix}*"):
                shutil.rmtree(leftover, ignore_errors=True)
            staging = Path(tempfile.mkdtemp(prefix=prefix, dir=final.parent))
            try:
                build(staging)
                check_cancel(cancel)
                _settle(staging)
                staging.rename(final)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise disk_error(error, final.parent) from error
    return final


def _settle(folder: Path) -> None:
    """Flush to the disk, so that a power cut cannot leave a named folder of empty files."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def locked(path: Path, cancel: threading.Event | None) -> Iterator[None]:
    """Hold an exclusive lock; the system frees it however this process ends."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                check_cancel(cancel)
                time.sleep(POLL_SECONDS)
        yield
