"""``dspark profile``: measure what a round costs on this machine, store and show it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..charts import page
from ..errors import UsageError
from ..events import CostTable, Loading, Notice
from .options import add_model_flags, load_options
from .output import check_writable, write_text
from .progress import ProgressLine


def configure(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser, decoding=False)
    parser.set_defaults(method="auto", schedule="fixed", p_min=0.0, p_survival_min=0.0)
    group = parser.add_argument_group("profile")
    group.add_argument(
        "--again", action="store_true", help="measure even if a stored measurement is still valid"
    )
    group.add_argument(
        "--budget",
        type=float,
        metavar="S",
        help="spend about S seconds (default: a few on a GPU, half a minute on a CPU)",
    )
    group.add_argument(
        "--max-rows",
        type=int,
        default=8,
        metavar="N",
        help="price rounds of up to N requests (default: %(default)s)",
    )
    group.add_argument("--json", action="store_true", help="print the cost table as JSON")
    group.add_argument("--svg", type=Path, metavar="FILE", help="draw the prices as a chart")


def run(args: argparse.Namespace) -> int:
    if args.budget is not None and not args.budget > 0:
        raise UsageError("--budget must be above 0 seconds")
    if args.max_rows < 1:
        raise UsageError("--max-rows must be 1 or more")
    check_writable(args.svg)
    notices: list[str] = []
    with ProgressLine() as line:

        def report(event: Loading | Notice | CostTable) -> None:
            if isinstance(event, Loading):
                line(event)
            elif isinstance(event, Notice):
                notices.append(event.message)

        from ..bench import cost_report
        from ..loading import load_engine
        from ..profiling import cost_key, load_or_profile, profile_path

        engine, loaded = load_engine(load_options(args, max_rows=args.max_rows), report)
        cost = load_or_profile(
            engine,
            loaded.model,
            loaded.drafter,
            budget_seconds=args.budget,
            report=report,
            cache_dir=args.cache_dir,
            again=args.again,
        )
    for message in notices:
        print(f"dspark: {message}", file=sys.stderr)
    if not cost.known:
        raise UsageError(
            f"{loaded.model} decodes plainly ({loaded.reason})", "there is nothing to measure"
        )
    print(cost.to_json() if args.json else cost_report.text(cost))
    if args.svg:
        write_text(args.svg, page(cost_report.charts(cost), cost_report.note(cost)))
    if not args.json and not notices:
        path = profile_path(cost_key(engine, loaded.model, loaded.drafter), args.cache_dir)
        print(f"stored in {path}")
    return 0
