"""The chat in a real pseudo-terminal: first paint, typing while it writes, what the display costs.

    python benchmarks/chat.py [--model M] [--tokens N] [--repeats N]

First paint: from the start of the process until the prompt box is drawn. Typing:
from a key until it is on the screen, while a reply is written. Cost of the
display: tokens/s of the same greedy reply in the chat against
``dspark generate``, the two in turn, and the host's share of a round in each,
which is steadier where the machine is not.
"""

from __future__ import annotations

import argparse
import os
import platform
import pty
import re
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from datetime import date
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

from dspark_mlx.events import Finished, StepDone
from dspark_mlx.trace import read_trace

PROMPT = "Write a short story about a lighthouse keeper who finds a letter in a bottle."
KEYS = "the quick brown fox jumps over the lazy dog while the engine writes"
CODES = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b[=>()][0-9A-Z]?")


class Chat:
    """``dspark-chat`` on a pseudo-terminal of its own, with folders of its own."""

    def __init__(self, home: Path, *args: str) -> None:
        self.master, slave = pty.openpty()
        ioctl(slave, TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.begin = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tui", *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ
            | {"TERM": "xterm-256color", "XDG_DATA_HOME": str(home), "XDG_CONFIG_HOME": str(home)},
        )
        os.close(slave)
        self.seen = b""

    def until(self, text: str, start: int = 0, seconds: float = 300) -> float:
        """Seconds until ``text`` was written behind ``start`` bytes of output."""
        begin = time.perf_counter()
        while text.encode() not in CODES.sub(b"", self.seen[start:]):
            if time.perf_counter() - begin > seconds:
                raise SystemExit(f"{text!r} did not appear within {seconds:.0f} s")
            self.read(0.5)
        return time.perf_counter() - begin

    def read(self, seconds: float) -> None:
        if select.select([self.master], [], [], seconds)[0]:
            self.seen += os.read(self.master, 65536)

    def wait_for(self, trace: Path, kind: type, seconds: float = 600) -> None:
        """Until the trace has such an event; looks once a second, so as not to be the load."""
        mark = f'"event": "{kind.__name__}"'.encode()
        end = time.monotonic() + seconds
        while not trace.exists() or mark not in trace.read_bytes():
            if time.monotonic() > end:
                raise SystemExit(f"no {kind.__name__} within {seconds:.0f} s")
            wake = time.monotonic() + 1.0
            while time.monotonic() < wake:
                self.read(0.3)

    def send(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def first_paint(home: Path, model: str) -> float:
    chat = Chat(home, "--model", model)
    chat.until("Ask anything")
    seconds = time.perf_counter() - chat.begin
    chat.close()
    return seconds


def speed(trace: Path) -> tuple[float, float]:
    """Tokens/s, and the host's share of the rounds: there a display would hold the engine up."""
    events = list(read_trace(trace))
    (end,) = (event for event in events if isinstance(event, Finished))
    steps = [event for event in events if isinstance(event, StepDone)][3:]
    host = sum(step.host_seconds for step in steps) / sum(step.round_seconds for step in steps)
    return (end.generation_tokens - 1) / end.generation_seconds, host


def chat_speed(
    home: Path, model: str, tokens: int, keys: list[float] | None
) -> tuple[float, float]:
    """Tokens/s of a reply in the chat; with ``keys``, typing meanwhile and timing each key."""
    trace = home / "chat.jsonl"
    args = ["--max-tokens", str(tokens), "--temp", "0", "--schedule", "fixed"]
    chat = Chat(home, "--model", model, *args, "--trace", str(trace), PROMPT)
    chat.until("Ask anything")
    chat.wait_for(trace, StepDone)
    if keys is not None:
        for i in range(len(KEYS)):
            start = len(chat.seen)
            chat.send(KEYS[i])
            # The word typed so far: a single letter may be part of the reply.
            keys.append(chat.until(KEYS[: i + 1].split(" ")[-1] or " ", start, 30))
            time.sleep(0.1)
            if b'"event": "Finished"' in trace.read_bytes():
                break
    chat.wait_for(trace, Finished)
    chat.close()
    return speed(trace)


def plain_speed(home: Path, model: str, tokens: int) -> tuple[float, float]:
    trace = home / "generate.jsonl"
    command = [sys.executable, "-m", "dspark_mlx", "generate"]
    flags = [
        "--model",
        model,
        "--trace",
        str(trace),
        "--max-tokens",
        str(tokens),
        "--temp",
        "0",
        "--schedule",
        "fixed",
    ]
    subprocess.run([*command, *flags, "--prompt", PROMPT], check=True, stdout=subprocess.DEVNULL)
    return speed(trace)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(f"{args.model}, {platform.machine()}, {os.cpu_count()} cores, {date.today()}")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        paints = [first_paint(home, args.model) for _ in range(args.repeats + 2)]
        print(f"first paint s: median {statistics.median(paints):.2f}, max {max(paints):.2f}")
        keys: list[float] = []
        chat_speed(home, args.model, 2 * args.tokens, keys)
        keys = sorted(1e3 * key for key in keys)
        p95 = keys[min(len(keys) - 1, int(0.95 * len(keys)))]
        print(
            f"key to screen ms: median {statistics.median(keys):.0f}, p95 {p95:.0f} of {len(keys)}"
        )
        ratios = []
        for _ in range(args.repeats):
            plain, host = plain_speed(home, args.model, args.tokens)
            shown, chat_host = chat_speed(home, args.model, args.tokens, None)
            ratios.append(shown / plain)
            print(
                f"tokens/s: {plain:.2f} without a display, {shown:.2f} in the chat; "
                f"host share of a round: {host:.2%}, {chat_host:.2%}",
                flush=True,
            )
        print(f"chat against no display: median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
