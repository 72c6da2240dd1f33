"""``dspark bench``: methods, schedules and peers side by side; or policies on cost tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..charts import Chart, page
from ..errors import UsageError
from ..events import CostTable, Loading, Notice
from .options import add_model_flags, count, load_options, positive, temperatures
from .output import check_writable, write_text
from .progress import ProgressLine

if TYPE_CHECKING:
    from ..bench.comparison import Benchmark
    from ..bench.competing_load import LoadSpec
    from ..bench.workload import BenchPrompt

EXIT_NOT_LOSSLESS = 1
SCHEDULES = ["auto", "fixed"]
UNUSED = {  # flags of which a measurement makes no use
    "simulate": ("methods", "against", "load", "temps", "prompts", "clock"),
    "load": ("concurrency", "temps", "against", "repeats", "clock", "seed"),
}
EXIT_INTERRUPTED = 130


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit code 1: a reply differed from the model's own where it was no near-tie. "
        "For --simulate, COST is a file from dspark profile --json, a built-in table or all; "
        "TRACE a file from --trace, a synthetic domain or all."
    )
    add_model_flags(parser, decoding=False)
    parser.set_defaults(p_min=0.0, p_survival_min=0.0, method="auto", schedule="fixed")
    group = parser.add_argument_group("what is compared")
    group.add_argument(
        "--methods",
        type=_names,
        metavar="A,B",
        help="of dspark, draft, lookup, none (default: all here)",
    )
    group.add_argument(
        "--schedules",
        type=_names,
        default=SCHEDULES,
        metavar="A,B",
        help="policies, also fixed:N (tokens) and threshold:P (survival); default: auto,fixed",
    )
    group.add_argument(
        "--concurrency",
        type=_counts,
        default=[1],
        metavar="N,N",
        help="requests at once, the next joins as one ends (default: 1)",
    )
    group.add_argument(
        "--temps", type=temperatures, default=(0.0,), metavar="T,T", help="0 is greedy (default: 0)"
    )
    group.add_argument(
        "--against", type=_names, default=[], metavar="A,B", help="peers: mlx-lm, mlx-dspark"
    )
    group.add_argument(
        "--peer-draft-model", metavar="DIR", help="a small model for mlx-lm's own speculation"
    )
    group = parser.add_argument_group("how much")
    group.add_argument(
        "--prompts", type=Path, nargs="+", default=[], metavar="FILE", help="JSON lines of prompts"
    )
    group.add_argument("--limit", type=positive, metavar="N", help="at most N prompts a domain")
    group.add_argument(
        "--tokens", type=positive, default=64, metavar="N", help="a reply (default: %(default)s)"
    )
    group.add_argument(
        "--repeats", type=positive, default=1, metavar="N", help="of everything, for a median"
    )
    group.add_argument(
        "--seed", type=count, default=0, metavar="N", help="for temperatures above 0"
    )
    group.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: count this process's processor time, for the CPU backend on a busy machine",
    )
    group = parser.add_argument_group("other measurements")
    group.add_argument(
        "--load", metavar="SPEC", help="response to a load that comes and goes: cpu:1, gpu:1"
    )
    group.add_argument(
        "--load-rounds", type=positive, default=40, metavar="N", help="rounds of a phase"
    )
    group.add_argument(
        "--simulate", nargs=2, metavar=("COST", "TRACE"), help="policies on a cost table; no model"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    group.add_argument("--svg", type=Path, metavar="FILE", help="draw them")
    unused = {*UNUSED["simulate"], *UNUSED["load"]}
    parser.set_defaults(defaults={name: parser.get_default(name) for name in unused})


def run(args: argparse.Namespace) -> int:
    _check_flags(args)
    if args.simulate:
        return _simulate(args)
    from ..bench.competing_load import parse_load
    from ..bench.peers import check_peer_names
    from ..bench.workload import Workload, load_prompts, variants

    # What is wrong on the command line is said before anything is loaded.
    prompts = load_prompts(args.prompts, args.limit)
    load = parse_load(args.load) if args.load else None
    variants(args.methods or ["none"], args.schedules)
    check_peer_names(args.against)
    with ProgressLine() as line:

        def report(event: Loading | Notice | CostTable) -> None:
            if isinstance(event, Loading):
                line(event)
            elif isinstance(event, Notice):
                print(f"dspark: {event.message}", file=sys.stderr)

        from ..bench import comparison_report
        from ..bench.comparison import Benchmark

        options = load_options(args, max_rows=max(args.concurrency))
        benchmark = Benchmark.load(options, report, _follow(line))
        if load is not None:
            return _respond(args, benchmark, prompts, load)
        workload = Workload(
            prompts,
            concurrency=args.concurrency,
            temperatures=args.temps,
            tokens=args.tokens,
            repeats=args.repeats,
            seed=args.seed,
            clock=args.clock,
        )
        results = benchmark.compare(
            workload,
            methods=args.methods,
            schedules=args.schedules,
            against=args.against,
            draft_model=args.peer_draft_model,
        )
    print(comparison_report.text(results))
    charts, note = comparison_report.charts(results), comparison_report.note(results)
    _write(args, results.to_json(), charts, note)
    if results.stopped:
        return EXIT_INTERRUPTED
    return 0 if results.lossless else EXIT_NOT_LOSSLESS


def _check_flags(args: argparse.Namespace) -> None:
    """Say before anything is measured what could not be honoured, or written, afterwards."""
    check_writable(args.json)
    check_writable(args.svg)
    mode = "simulate" if args.simulate else "load" if args.load else ""
    for name in UNUSED.get(mode, ()):
        if getattr(args, name) != args.defaults[name]:
            raise UsageError(f"--{mode} makes no use of --{name}", f"leave --{name} out")
    if mode == "load" and args.schedules != SCHEDULES and len(args.schedules) > 1:
        raise UsageError("--load follows one schedule at a time", "name it with --schedules")


def _respond(
    args: argparse.Namespace, benchmark: Benchmark, prompts: list[BenchPrompt], load: LoadSpec
) -> int:
    from ..bench import load_response

    methods = [m for m in args.methods or [None] if m != "none"] or ["none"]
    if len(methods) > 1:
        raise UsageError("--load follows one method at a time", "name it with --methods")
    response = benchmark.respond(
        prompts,
        load,
        method=methods[0],
        schedule=args.schedules[0],
        rounds=args.load_rounds,
        tokens=args.tokens,
    )
    print(load_response.text(response))
    about = benchmark.about()
    _write(
        args,
        {"about": about, "response": response.to_json()},
        load_response.charts(response),
        ", ".join(str(value) for value in about.values() if value),
    )
    return 0 if response.unchanged else EXIT_NOT_LOSSLESS


def _simulate(args: argparse.Namespace) -> int:
    from ..bench import simulation

    cost, trace = args.simulate
    worlds, texts = simulation.costs(cost), simulation.replies(trace, args.seed)
    with ProgressLine() as line:
        cells = simulation.run(
            worlds, texts, args.schedules, args.concurrency, progress=_follow(line)
        )
    print(simulation.text(cells))
    _write(args, simulation.to_json(cells), simulation.charts(cells), "simulated")
    return 0


def _write(args: argparse.Namespace, data: Any, charts: Sequence[Chart], note: str) -> None:
    if args.json:
        write_text(args.json, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    if args.svg:
        write_text(args.svg, page(charts, note))


def _follow(line: ProgressLine) -> Callable[[int, int, str], None]:
    def show(done: int, total: int, what: str) -> None:
        line.show(f"{what}  {done}/{total}" if total else what)

    return show


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("name at least one")
    return names


def _counts(text: str) -> list[int]:
    return [positive(part) for part in _names(text)]
