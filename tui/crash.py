"""What is left of a crash: the traceback in the log, and one line for the terminal."""

from __future__ import annotations

import time

from . import paths


def note(traceback: str) -> str:
    """Add ``traceback`` to the log; returns the line to print once the terminal is restored."""
    try:
        path = paths.log_file()
        paths.private(path.parent)
        with path.open("a", encoding="utf-8") as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}\n{traceback}\n")
    except OSError:
        return f"dspark-chat: error: the chat crashed: {traceback.strip().splitlines()[-1]}"
    return f"dspark-chat: error: the chat crashed; the details are in {path}"
