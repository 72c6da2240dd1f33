"""Ends the process when its terminal is gone.

A closed terminal usually sends SIGHUP, which ends the app in good order. The signal may not arrive
(another session leader), or the event loop may wait to write to the dead terminal; then a thread
that needs neither ends the process. Everything older than a second has been saved by then.
"""

from __future__ import annotations

import os
import select
import threading
import time

CHECK_SECONDS = 1.0
GRACE_SECONDS = 5.0
EXIT_HANGUP = 129  # 128 + SIGHUP


def watch(fd: int) -> threading.Thread:
    """End the process ``GRACE_SECONDS`` after the terminal at ``fd`` has hung up."""
    thread = threading.Thread(target=_wait, args=(fd,), name="hangup", daemon=True)
    thread.start()
    return thread


def _wait(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, 0)  # hang-ups are reported without being asked for
    while not any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0)):
        time.sleep(CHECK_SECONDS)
    time.sleep(GRACE_SECONDS)
    os._exit(EXIT_HANGUP)
