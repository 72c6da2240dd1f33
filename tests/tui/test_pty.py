"""The chat as a person runs it: a real pseudo-terminal, a real engine thread, a toy model."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from folders import write_model
from make_trace import make

from dspark_mlx.events import Finished, StepDone, to_json
from dspark_mlx.trace import read_trace
from tui.session_store import SessionStore

ROOT = Path(__file__).parents[2]
_CODES = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b[=>()][0-9A-Z]?")


class Terminal:
    """A child on a pseudo-terminal of 100 x 30; ``seen`` is all it wrote."""

    def __init__(self, *args: str, env: dict[str, str] | None = None) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (30, 100))
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        self.seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tui", *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm-256color"} | (env or {}),
        )

    def read(self, seconds: float = 0.05) -> None:
        ready, _, _ = select.select([self.master], [], [], seconds)
        if ready:
            try:
                self.seen += os.read(self.master, 65536)
            except OSError:
                time.sleep(0.01)

    def expect(self, text: str, seconds: float = 60, start: int = 0) -> None:
        """Wait until ``text`` was written, styles aside."""
        end = time.monotonic() + seconds
        while text.encode() not in _CODES.sub(b"", self.seen[start:]):
            if time.monotonic() > end or self.process.poll() is not None:
                tail = _CODES.sub(b"", self.seen)[-1500:].decode(errors="replace")
                pytest.fail(f"waited in vain for {text!r}, saw: {tail}")
            self.read()

    def until(self, condition: Callable[[], bool], seconds: float = 90) -> None:
        """Read on until ``condition`` holds."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end or self.process.poll() is not None:
                pytest.fail("waited in vain")
            self.read()

    def send(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def wait(self, seconds: float = 30) -> int:
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            if time.monotonic() > end:
                pytest.fail("it did not end")
            self.read()
        for _ in range(5):
            self.read(0.02)
        return self.process.returncode

    def restored(self) -> bool:
        """Whether the terminal is as it was: modes, alternate screen, cursor, mouse, paste."""
        modes = termios.tcgetattr(self._slave)[:4] == self.before[:4]
        codes = [b"\x1b[?1049l", b"\x1b[?25h", b"\x1b[?1000l", b"\x1b[?2004l"]
        return modes and all(code in self.seen for code in codes)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self._slave)


@pytest.fixture
def terminal() -> Iterator:
    opened: list[Terminal] = []

    def start(*args: str, **more) -> Terminal:
        opened.append(Terminal(*args, **more))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_a_question_is_asked_answered_stopped_and_the_program_left(
    terminal, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    trace = tmp_path / "run.jsonl"
    term = terminal("--model", str(model), "--max-tokens", "24", "--trace", str(trace))
    term.expect("Ask anything")
    term.send("hello there\r")
    term.expect("24 tokens")
    term.send("\x1b[200~two\nlines\x1b[201~")  # a bracketed paste stays in the box
    term.expect("lines")
    term.send("\r")
    term.until(lambda: sum(isinstance(e, Finished) for e in read_trace(trace)) == 2)
    term.read(0.5)  # a few beats of the app, so that it knows too
    term.send("\x03")
    term.expect("again to quit")
    term.send("\x03")
    assert term.wait() == 0
    assert term.restored()
    events = list(read_trace(trace))
    assert sum(isinstance(e, Finished) for e in events) == 2
    assert any(isinstance(e, StepDone) for e in events)


def test_a_paste_with_escape_codes_and_line_ends_is_one_text_and_sends_nothing(
    terminal, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    trace = tmp_path / "run.jsonl"
    term = terminal("--model", str(model), "--max-tokens", "4", "--trace", str(trace))
    term.expect("Ask anything")
    for part in ("\x1b[20", "0~ab \x1b", "[31m cd\r\nef \x1b\x1b[A gh\r\x1b[", "201~"):
        term.send(part)
        term.read(0.3)
    term.send("!")
    term.expect("!")
    term.send("\r")  # only this one sends
    term.until(lambda: any(isinstance(e, Finished) for e in read_trace(trace)))
    term.read(1.5)
    store = SessionStore(next(tmp_path.rglob("chat.sqlite3")))
    (entry,) = store.entries()
    saved = store.load(entry.session)
    assert saved is not None and [m.role for m in saved.messages] == ["user", "assistant"]
    assert saved.messages[0].text == "ab  cd\nef  gh\n!"
    store.close()


@pytest.fixture
def long_trace(tmp_path: Path) -> Path:
    path = tmp_path / "long.jsonl"
    path.write_text("".join(to_json(event) + "\n" for event in make(1, 2000)))
    return path


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_cleanly_with_the_terminal_restored(
    terminal, long_trace: Path, sign: int
) -> None:
    term = terminal("--replay", str(long_trace))
    term.expect("recorded request")
    term.process.send_signal(sign)
    assert term.wait() == 0
    assert term.restored()


def test_a_crash_restores_the_terminal_and_shows_where_the_log_is(
    terminal, long_trace: Path, tmp_path: Path
) -> None:
    # A fault put in from outside: the state refuses the tenth event.
    (tmp_path / "fault").mkdir()
    (tmp_path / "fault" / "sitecustomize.py").write_text(
        "from dspark_mlx import stats\n"
        "whole, count = stats.EngineStats.apply, [0]\n"
        "def apply(self, event):\n"
        "    count[0] += 1\n"
        "    if count[0] > 9: raise RuntimeError('put in by a test')\n"
        "    whole(self, event)\n"
        "stats.EngineStats.apply = apply\n"
    )
    path = f"{tmp_path / 'fault'}{os.pathsep}{ROOT}"
    term = terminal("--replay", str(long_trace), env={"PYTHONPATH": path})
    assert term.wait() == 1
    assert term.restored()
    text = _CODES.sub(b"", term.seen).decode(errors="replace")
    assert "the chat crashed; the details are in" in text and "Traceback" not in text
    log = next(tmp_path.rglob("chat.log")).read_text()
    assert "put in by a test" in log


def test_a_kill_leaves_what_was_on_the_screen(terminal, tmp_path: Path) -> None:
    from tui.session_store import SessionStore

    model = write_model(tmp_path / "model")
    trace = tmp_path / "run.jsonl"
    term = terminal("--model", str(model), "--max-tokens", "-1", "--trace", str(trace))
    term.expect("Ask anything")
    term.send("hello there\r")
    term.expect("Assistant")
    term.until(lambda: any(isinstance(e, StepDone) for e in read_trace(trace)))
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        term.read()
    os.kill(term.process.pid, signal.SIGKILL)
    term.process.wait()
    store = SessionStore(next(tmp_path.rglob("chat.sqlite3")))
    (entry,) = store.entries()
    saved = store.load(entry.session)
    assert saved is not None and saved.messages[0].text == "hello there"
    assert len(saved.messages[1].text) > 0
    store.close()
