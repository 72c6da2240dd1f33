"""Whether ``auto`` needs no tuning on this machine: against fixed lengths, batched, under load.

    python benchmarks/adaptive.py [--model M] [--drafter D] [--method dspark|lookup]
        [--parts one,batch,load] [--lengths 1,2,4,7] [--limit N] [--tokens N] [--repeats N]
        [--clock wall|cpu]

Prints one line for each thing that must hold and exits with 1 where one does not: per domain at
least 97 % of the best fixed length in hindsight and of plain decoding; with 4 requests at once
at least the best of plain and fixed; and under load the scheduled length moves within 15 rounds,
and afterwards is where it was before. All in one process, interleaved, losslessness checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dspark_mlx.bench import comparison_report as report
from dspark_mlx.bench import load_response
from dspark_mlx.bench.comparison import Benchmark
from dspark_mlx.bench.competing_load import parse_load
from dspark_mlx.bench.results import Results
from dspark_mlx.bench.workload import Workload, load_prompts
from dspark_mlx.events import Event
from dspark_mlx.loading import LoadOptions

SHARE = 0.97  # a goal, no measurement: what `auto` must reach of the best fixed length
BATCH = 4  # requests in flight


class Checks:
    """What had to hold, and whether it did."""

    def __init__(self) -> None:
        self.missed = 0

    def say(self, held: bool, what: str) -> None:
        self.missed += not held
        print(f"{'met   ' if held else 'MISSED'}  {what}", flush=True)


def against_fixed(benchmark: Benchmark, args: argparse.Namespace, checks: Checks) -> None:
    results = compare(benchmark, args, concurrency=[1])
    for verdict in report.hindsight(results):
        plain = verdict.of_plain or 0.0
        checks.say(verdict.of_best >= SHARE and plain >= SHARE, report.line(verdict))
    checks.say(results.lossless, report.losslessness(results)[0])


def batched(benchmark: Benchmark, args: argparse.Namespace, checks: Checks) -> None:
    results = compare(benchmark, args, concurrency=[BATCH])
    cells = results.cells()
    rates = {
        system: report.over_domains(results, [c for c in cells if c.name.system == system]).tps
        for system in results.systems
        if system != results.baseline
    }
    auto = rates.pop(f"{args.method} auto")
    best = max(rates, key=lambda system: rates[system])
    checks.say(
        auto >= rates[best],
        f"{BATCH} at once, all domains: auto {auto:.2f} tokens/s, best other {best} "
        f"{rates[best]:.2f} ({100 * auto / rates[best]:.0f} %)",
    )
    checks.say(results.lossless, report.losslessness(results)[0])


def under_load(benchmark: Benchmark, args: argparse.Namespace, checks: Checks) -> None:
    found = benchmark.respond(
        load_prompts(limit=args.limit),
        parse_load(args.load),
        method=args.method,
        tokens=args.tokens,
    )
    print(load_response.text(found))
    for word, moved in zip(load_response.PHASES[1:], found.moved, strict=True):
        checks.say(
            moved is None or moved <= load_response.SETTLE,
            f"load {word}: " + ("the same length pays" if moved is None else f"{moved} rounds"),
        )
    checks.say(found.recovered, f"load gone: {found.left:+.2f} tokens from the length before it")
    checks.say(found.unchanged, f"output unchanged in {found.replies} replies")


def compare(benchmark: Benchmark, args: argparse.Namespace, concurrency: Sequence[int]) -> Results:
    workload = Workload(
        load_prompts(limit=args.limit),
        concurrency=concurrency,
        tokens=args.tokens,
        repeats=args.repeats,
        clock=args.clock,
    )
    results = benchmark.compare(
        workload,
        methods=["none", args.method],
        schedules=["auto", *(f"fixed:{n}" for n in args.lengths)],
    )
    print(report.text(results), flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter")
    parser.add_argument("--method", default="dspark")
    parser.add_argument("--parts", type=lambda s: s.split(","), default=["one", "batch", "load"])
    parser.add_argument(
        "--lengths", type=lambda s: [int(n) for n in s.split(",")], default=[1, 2, 4, 7]
    )
    parser.add_argument("--limit", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--load", default="cpu:2")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    args = parser.parse_args()

    def progress(done: int, total: int, what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{what} {done}/{total}", end="", file=sys.stderr)

    def ignore(event: Event) -> None:
        """Loading is quick, and what is measured is shown by ``progress``."""

    benchmark = Benchmark.load(LoadOptions(args.model, drafter=args.drafter), ignore, progress)
    checks = Checks()
    parts = {"one": against_fixed, "batch": batched, "load": under_load}
    for part in args.parts:
        parts[part](benchmark, args, checks)
    return 1 if checks.missed else 0


if __name__ == "__main__":
    sys.exit(main())
