"""What the chat's display costs: CPU seconds of its own thread for each second of a reply.

    python benchmarks/display.py [--replay TRACE [--speed X]] [--size 120x40]
                                 [--keys KEYS] [--model M] [--tokens N] [--pause S --repeats N]

The chat runs in a pseudo-terminal that is read to its end. Without ``--replay``
the model writes a reply. CPU seconds of one thread depend little on what else
the machine does, so they bound what the display can take from the generation:
this share of one core, at most. ``--keys`` are pressed before (^T colours tokens,
^G opens the monitor).

With ``--pause`` the display stands still for every other stretch of so many
seconds while the model goes on, and rounds of the two kinds of stretch are
compared, each with its neighbour: what the display takes from the generation,
whatever else slows the machine by the minute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import pty
import statistics
import subprocess
import sys
import tempfile
import termios
import threading
import time
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

from chat import PROMPT

from tui import __main__ as command
from tui import app as chat_app

LEAST = 3  # rounds of a stretch that make a mean


class Measured(chat_app.ChatApp):
    """Notes the display thread's CPU time between a reply's second round and its last."""

    CSS_PATH = str(Path(chat_app.__file__).with_name("app.tcss"))
    keys: tuple[str, ...] = ()
    result = Path()
    pause = 0.0
    _begun: tuple[float, float, float] | None = None

    async def tick(self) -> None:
        if self._begun and self.pause and stretch(time.time(), self.pause) % 2:
            return
        await super().tick()
        samples, active = self.stats.samples, bool(self.stats.active)
        if self._begun is None and len(samples) > 1:
            for key in self.keys:
                self.simulate_key(key)
            self._begun = _now()
        elif self._begun is not None and not active and self.stats.requests:
            spent = [b - a for a, b in zip(self._begun, _now(), strict=True)]
            host = sum(s.host_seconds for s in samples) / sum(s.round_seconds for s in samples)
            tokens = sum(s.tokens for s in samples)
            rounds = [(s.time, s.scheduled) for s in samples]
            self.result.write_text(json.dumps([*spent, host, len(samples), tokens, rounds]))
            self._begun = None
            self.exit()


def stretch(when: float, seconds: float) -> int:
    """The number of the stretch; the display stands still in the odd ones."""
    return int(when // seconds)


def slower(rounds: list[tuple[float, int]], seconds: float) -> list[float]:
    """Time of a round shown over one not shown, for each two neighbouring stretches.

    Only rounds of the commonest width that began and ended in one stretch count.
    """
    width = statistics.mode(verified for _, verified in rounds)
    took: dict[int, list[float]] = {}
    for (begin, _), (end, verified) in pairwise(rounds):
        if verified == width and stretch(begin, seconds) == stretch(end, seconds):
            took.setdefault(stretch(end, seconds), []).append(end - begin)
    mean = {n: statistics.mean(times) for n, times in took.items() if len(times) >= LEAST}
    pairs = [(mean[n], mean[n + 1], n % 2) for n in mean if n + 1 in mean]
    return [b / a if odd else a / b for a, b, odd in pairs]


def _now() -> tuple[float, float, float]:
    return time.perf_counter(), time.thread_time(), time.process_time()


def inside(arguments: list[str]) -> None:
    """In the pseudo-terminal: the chat itself."""
    result, keys, pause, *rest = arguments
    Measured.pause = float(pause)
    Measured.result, Measured.keys = Path(result), tuple(key for key in keys.split(",") if key)
    chat_app.ChatApp = Measured  # type: ignore[misc]
    sys.exit(command.main(rest))


def measure(size: tuple[int, int], keys: str, pause: float, chat: list[str]) -> dict[str, Any]:
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
                str(pause),
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
        wall, ui, whole, host, count, tokens, rounds = json.loads(result.read_text())
    return {
        "seconds": wall,
        "ui": ui / wall,
        "process": whole / wall,
        "host": host,
        "rounds": count / wall,
        "tokens": tokens / wall,
        "kB": written[0] / wall / 1000,
        "slower": slower(rounds, pause) if pause else [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--size", default="120x40")
    parser.add_argument("--keys", default="", help="comma-separated, such as ctrl+t,ctrl+g")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--pause", type=float, default=0.0, metavar="S")
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    width, height = (int(n) for n in args.size.split("x"))
    if args.replay:
        chat = ["--replay", str(args.replay), "--speed", str(args.speed)]
    else:
        chat = ["--model", args.model, "--max-tokens", str(args.tokens), "--temp", "0", PROMPT]
        if args.pause:  # rounds alike
            chat += ["--schedule", "fixed"]
    print(f"{platform.machine()}, {os.cpu_count()} cores, {date.today()}, {width}x{height}")
    ratios: list[float] = []
    for _ in range(args.repeats):
        got = measure((width, height), args.keys, args.pause, chat)
        ratios += got["slower"]
        print(
            f"{got['tokens']:.1f} tokens/s in {got['rounds']:.1f} rounds/s, "
            f"{got['seconds']:.0f} s; display thread {got['ui']:.3f} of a core, "
            f"{got['ui'] / (os.cpu_count() or 1):.3f} of the machine; {got['kB']:.1f} kB/s written"
            + ("" if args.replay else f"; host share of a round {got['host']:.2%}"),
            flush=True,
        )
    if len(ratios) > 1:
        middle, spread = statistics.median(ratios), statistics.stdev(ratios)
        print(
            f"a round with the display against one without, {len(ratios)} pairs of stretches: "
            f"median {middle:.3f}, mean {statistics.mean(ratios):.3f} "
            f"± {spread / len(ratios) ** 0.5:.3f}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2:])
    else:
        main()
