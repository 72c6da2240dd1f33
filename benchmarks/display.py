"""What the chat's display costs: CPU seconds of its own thread for each second of a reply.

    python benchmarks/display.py [--replay TRACE [--speed X]] [--size 120x40]
                                 [--keys KEYS] [--model M] [--tokens N]

The chat runs in a pseudo-terminal that is read to its end. Without ``--replay``
the model writes a reply. CPU seconds of one thread depend little on what else
the machine does, so they bound what the display can take from the generation:
this share of one core, at most. ``--keys`` are pressed before (^T colours tokens,
^G opens the monitor).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import pty
import subprocess
import sys
import tempfile
import termios
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

from chat import PROMPT

from tui import __main__ as command
from tui import app as chat_app


class Measured(chat_app.ChatApp):
    """Notes the display thread's CPU time between a reply's second round and its last."""

    CSS_PATH = Path(chat_app.__file__).with_name("app.tcss")
    keys: tuple[str, ...] = ()
    result = Path()
    _start: tuple[float, float, float] | None = None

    async def pump(self) -> None:
        await super().pump()
        samples, active = self.live.samples, bool(self.live.active)
        if self._start is None and len(samples) > 1:
            for key in self.keys:
                self.simulate_key(key)
            self._start = _now()
        elif self._start is not None and not active and self.live.requests:
            spent = [b - a for a, b in zip(self._start, _now(), strict=True)]
            host = sum(s.host_seconds for s in samples) / sum(s.round_seconds for s in samples)
            tokens = sum(s.tokens for s in samples)
            self.result.write_text(json.dumps([*spent, host, len(samples), tokens]))
            self._start = None
            self.exit()


def _now() -> tuple[float, float, float]:
    return time.perf_counter(), time.thread_time(), time.process_time()


def inside(arguments: list[str]) -> None:
    """In the pseudo-terminal: the chat itself."""
    result, keys, *rest = arguments
    Measured.result, Measured.keys = Path(result), tuple(key for key in keys.split(",") if key)
    chat_app.ChatApp = Measured  # type: ignore[misc]
    sys.exit(command.main(rest))


def measure(size: tuple[int, int], keys: str, chat: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as home:
        result = Path(home) / "result.json"
        master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (size[1], size[0]))
        folders = {name: home for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME")}
        process = subprocess.Popen(
            [
                sys.executable,
                __file__,
                "--inside",
                str(result),
                keys,
                *chat,
            ],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm-256color"} | folders,
        )
        os.close(slave)
        written = [0]

        def read() -> None:
            while True:
                try:
                    written[0] += len(os.read(master, 65536))
                except OSError:
                    return

        threading.Thread(target=read, daemon=True).start()
        process.wait()
        if not result.exists():
            raise SystemExit("the chat ended before the reply did")
        wall, ui, whole, host, rounds, tokens = json.loads(result.read_text())
    return {
        "seconds": wall,
        "ui": ui / wall,
        "process": whole / wall,
        "host": host,
        "rounds": rounds / wall,
        "tokens": tokens / wall,
        "kB": written[0] / wall / 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--size", default="120x40")
    parser.add_argument("--keys", default="", help="comma-separated, such as ctrl+t,ctrl+g")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=192)
    args = parser.parse_args()
    width, height = (int(n) for n in args.size.split("x"))
    if args.replay:
        chat = ["--replay", str(args.replay), "--speed", str(args.speed)]
    else:
        chat = ["--model", args.model, "--max-tokens", str(args.tokens), "--temp", "0", PROMPT]
    got = measure((width, height), args.keys, chat)
    print(f"{platform.machine()}, {os.cpu_count()} cores, {date.today()}, {width}x{height}")
    print(
        f"{got['tokens']:.1f} tokens/s in {got['rounds']:.1f} rounds/s, {got['seconds']:.0f} s; "
        f"display thread {got['ui']:.3f} of a core, {got['ui'] / (os.cpu_count() or 1):.3f} "
        f"of the machine; {got['kB']:.1f} kB/s written"
        + ("" if args.replay else f"; host share of a round {got['host']:.2%}")
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2:])
    else:
        main()
