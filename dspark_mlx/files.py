"""Writing files so that a crash or a full disk never leaves half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: str | bytes, *, mode: int | None = None) -> None:
    """Replace the file ``path`` by ``content``; it holds the old content or all of the new.

    Text is written as UTF-8. The folder is made if it is missing. ``mode`` holds the permission
    bits of the new file; with None it gets those of the file that it replaces, or else those that
    the process gives to new files. Raises OSError, and then ``path`` is as it was.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, _mode_for(path) if mode is None else mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _mode_for(path: Path) -> int:
    try:
        return path.stat().st_mode & 0o777
    except FileNotFoundError:
        mask = os.umask(0o077)  # the mask can only be read by setting it
        os.umask(mask)
        return 0o666 & ~mask
