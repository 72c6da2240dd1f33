"""A process whose terminal is gone ends, even when nothing tells it and its loop is stuck."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from tui import hangup

STUCK = """
import sys, time
from tui import hangup
hangup.CHECK_SECONDS = 0.05
hangup.GRACE_SECONDS = 0.05
hangup.watch(2)
print("ready", file=sys.stderr, flush=True)
time.sleep(60)
"""


def test_a_stuck_process_ends_with_its_terminal() -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "PYTHONPATH": str(Path(hangup.__file__).parents[1])},
    )
    os.close(slave)
    said = b""
    while b"\n" not in said:  # the whole line: an unbuffered child writes it in two parts
        said += os.read(master, 1000)
    assert b"ready" in said, said
    assert process.poll() is None
    os.close(master)
    assert process.wait(timeout=30) == 129
