"""What it saves to have the device begin on a step while the host still builds its graph.

    python benchmarks/begin.py [--model M] [--widths 1,2,4,6] [--every 1,2,4,8] [--repeats N]

A lazy backend computes nothing before it is asked to. By default the graph of the whole model is
built first; with ``eager`` every few layers are handed to the device as soon as they are built.
One row. Each way is compared with the step without ``eager`` in the same pass, and every other
pass runs backwards, so that a drift of the clock speed cancels out.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from dspark_mlx.loading import LoadOptions, load_pair
from dspark_mlx.model import taps
from dspark_mlx.profiling.step_timer import blank_rows
from dspark_mlx.registry import Registry

import mlx.core as mx  # isort: skip  (after the package, which loads a fast BLAS first)

CONTEXT = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    for name, default in (("--widths", "1,2,4,6"), ("--every", "1,2,4,8")):
        parser.add_argument(
            name, default=default, type=lambda s: [int(n) for n in s.split(",")], metavar="N,..."
        )
    parser.add_argument("--repeats", type=int, default=12)
    args = parser.parse_args()
    entry = Registry.load().resolve(args.model)
    target = load_pair(entry, LoadOptions(args.model), lambda event: None).target
    rows = blank_rows(target, 1, CONTEXT)

    def step(width: int, every: int) -> float:
        tokens = mx.full((1, width), 1, dtype=mx.int32)
        mx.eval(tokens)
        taps.EAGER_LAYERS = every or 1
        began = time.perf_counter()
        logits, _ = target.forward(tokens, rows, eager=mx.async_eval if every else None)
        mx.eval(mx.argmax(logits, axis=-1), *rows.arrays)
        took = time.perf_counter() - began
        rows.trim_to([CONTEXT])
        return took

    print("tokens  ms without   layers handed over at a time: time against that")
    for width in args.widths:
        ways = [0, *args.every]
        passes = []
        for _ in range(args.repeats + 1):
            passes.append({n: step(width, n) for n in ways})
            ways.reverse()
        passes = passes[1:]  # the first was a warm-up
        ratios = [f"{n}: x{median(p[n] / p[0] for p in passes):.3f}" for n in args.every]
        print(f"{width:6}  {1e3 * median(p[0] for p in passes):10.1f}   {'  '.join(ratios)}")


if __name__ == "__main__":
    main()
