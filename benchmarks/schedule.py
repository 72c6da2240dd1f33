"""What a scheduling decision costs the host, and how ``auto`` fares in simulation.

    python benchmarks/schedule.py [--rows N] [--block K] [--rounds N] [--grid] [--tokens N]

The first table has the median microseconds of plan, schedule and observe on
each cost table, in processor time, so that a busy machine counts for little. Most
plans of ``auto`` hold for several rounds: ``mean`` is that of plan and schedule, ``90 %`` what they
take at most in nine rounds of ten, ``round`` the mean of all that a round takes.
``--grid`` adds, for every cost table, text and concurrency 1 to 8, the tokens/s
of ``auto`` over the best fixed length in hindsight and over plain decoding.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from datetime import date

import numpy as np

from dspark_mlx.bench.simulator.reply_trace import synthetic
from dspark_mlx.bench.simulator.simulate import in_hindsight, simulate
from dspark_mlx.bench.simulator.tables import tables
from dspark_mlx.schedule import Auto, EarlyStop, Lagged, Outcome, Policy, RowView

TEXTS = ("chat", "code", "math", "mixed")


def decisions(policy: Policy, rows: int, block: int, rounds: int) -> dict[str, float]:
    """Median microseconds of each call over ``rounds`` rounds, and of a round's decision."""
    text = [synthetic("code", 2000, block, i) for i in range(rows)]
    position = [0] * rows
    spent: dict[str, list[float]] = {"plan": [], "schedule": [], "observe": []}
    for _ in range(rounds):
        views = tuple(
            RowView(f"r{r}", "dspark", block, 4000, position[r], True, True) for r in range(rows)
        )
        start = time.process_time()
        plan = policy.plan(views)
        spent["plan"].append(time.process_time() - start)
        at = [p % 1900 for p in position]
        confidence = [text[r].confidence[at[r], : plan.widths[r]].tolist() for r in range(rows)]
        start = time.process_time()
        made = policy.schedule(views, plan.widths, confidence if plan.needs_confidence else None)
        spent["schedule"].append(time.process_time() - start)
        accepted = tuple(min(n, text[r].accepts[at[r]]) for r, n in enumerate(made.lengths))
        position = [p + a + 1 for p, a in zip(position, accepted, strict=True)]
        outcome = Outcome(
            views,
            plan.widths,
            made.lengths,
            accepted,
            tuple(a + 1 for a in accepted),
            tuple(map(tuple, confidence)),
            0.002 if plan.needs_confidence else 0.0,
            0.05,
            made.predicted_seconds or 0.05,
        )
        start = time.process_time()
        policy.observe(outcome)
        spent["observe"].append(time.process_time() - start)
    medians = {name: 1e6 * statistics.median(took) for name, took in spent.items()}
    both = [a + b for a, b in zip(spent["plan"], spent["schedule"], strict=True)]
    return medians | {
        "decision": 1e6 * statistics.median(both),
        "mean": 1e6 * statistics.mean(both),
        "slow": 1e6 * statistics.quantiles(both, n=10)[-1],
        "round": 1e6 * sum(map(sum, spent.values())) / rounds,
    }


def grid(tokens: int) -> None:
    """Ratios of auto over every cell, and the best single fixed length over all of them."""
    logs: dict[int | str, list[float]] = {}
    worst_best, worst_plain = 2.0, 2.0
    print(f"\n{'table':18} {'text':6} auto / best fixed in hindsight (its length), concurrency 1-8")
    for table in tables():
        for domain in TEXTS:
            cells = []
            for rows in range(1, 9):
                text = [synthetic(domain, tokens, 7, 100 + i) for i in range(max(7, 4 * rows))]
                fixed = in_hindsight(text, tables()[table], rows, drain=False)
                auto = simulate(
                    Auto(tables()[table]), text, tables()[table], concurrency=rows, drain=False
                )
                best = max(fixed, key=lambda n: fixed[n].tps)
                ratio, plain = auto.tps / fixed[best].tps, auto.tps / fixed[0].tps
                worst_best, worst_plain = min(worst_best, ratio), min(worst_plain, plain)
                cells.append(f"{ratio:.3f} ({best})")
                logs.setdefault("auto", []).append(np.log(plain))
                for n, run in fixed.items():
                    logs.setdefault(n, []).append(np.log(run.tps / fixed[0].tps))
            print(f"{table:18} {domain:6} {'  '.join(cells)}")
    means = {name: float(np.exp(np.mean(values))) for name, values in logs.items()}
    print(f"worst cell: {worst_best:.3f} of the best fixed length, {worst_plain:.3f} of plain")
    print("geometric mean over plain:", "  ".join(f"{k} {v:.3f}" for k, v in means.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--grid", action="store_true")
    args = parser.parse_args()
    print(f"{args.rows} rows x {args.block} positions, {platform.machine()}, {date.today()}")
    names = ("plan", "sched.", "both", "mean", "90 %", "observe", "round")
    print(f"{'policy':12} {'table':18}" + "".join(f"{name:>8}" for name in names) + "  µs")
    for make in (Auto, EarlyStop, Lagged):
        for table in tables():
            policy = make(tables()[table])
            took = decisions(policy, args.rows, args.block, args.rounds)
            print(
                f"{policy.name:12} {table:18} {took['plan']:7.0f} {took['schedule']:7.0f} "
                f"{took['decision']:7.0f} {took['mean']:7.0f} {took['slow']:7.0f} "
                f"{took['observe']:7.0f} {took['round']:7.0f}"
            )
    if args.grid:
        grid(args.tokens)


if __name__ == "__main__":
    main()
