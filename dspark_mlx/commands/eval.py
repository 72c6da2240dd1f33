"""``dspark eval``: how many draft tokens the target accepts, by domain and temperature.

Plays real rounds on held-out prompts and verifies the whole block each time. Copies of earlier
text are drafted too, as in use; ``--no-copy`` measures the drafter alone. ``dspark bench``
measures speed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .options import add_model_flags, count, load_options, positive, temperatures
from .progress import ProgressLine

if TYPE_CHECKING:
    from ..training.rounds import HeldOutPrompt, PlayedRound


def configure(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser, decoding=False, draft_model=False)
    add_prompt_flags(parser, prompts=8)


def run(args: argparse.Namespace) -> int:
    from ..training.rounds import evaluation_engine, play

    prompts = held_out_prompts(args)
    engine, drafter = evaluation_engine(load_options(args), calibrated=True, rows=args.rows)
    with ProgressLine() as line:
        rounds = play(
            engine,
            prompts,
            args.temps,
            args.max_tokens,
            seed=args.seed,
            on_reply=lambda *done: follow(line, *done),
        )
    result = summary(rounds, drafter.block_size)
    result |= {"model": args.model, "prompts": len(prompts), "max_tokens": args.max_tokens}
    result["calibrated"] = drafter.calibration is not None
    print(json.dumps(result, indent=2) if args.json else table(result))
    return 0


def add_prompt_flags(parser: argparse.ArgumentParser, prompts: int) -> None:
    """Which prompts to answer, and how; ``prompts`` is how many of a domain by default."""
    group = parser.add_argument_group("prompts")
    add = group.add_argument
    add(
        "--data",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="jsonl of prompts that the drafter was not trained on (default: a small built-in set)",
    )
    for flag, kind, default, help_ in (
        ("--prompts", positive, prompts, "prompts per domain"),
        ("--skip", count, 0, "leave out the first N prompts of each domain"),
        ("--max-tokens", positive, 128, "longest reply in tokens"),
        ("--rows", positive, 8, "replies decoded together"),
        ("--seed", count, 0, "seed of sampled replies"),
    ):
        help_ += " (default: %(default)s)"
        add(flag, type=kind, default=default, metavar="N", help=help_)
    add(
        "--temps",
        type=temperatures,
        default=(0.0, 0.7, 1.0),
        metavar="T,T",
        help="temperatures; every prompt is answered at each (default: 0,0.7,1)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(method="dspark", schedule="fixed", profile=False)


def held_out_prompts(args: argparse.Namespace) -> list[HeldOutPrompt]:
    """The prompts that the flags ask for. Raises UsageError where there are none."""
    from ..training.rounds import default_prompts, read_prompts

    if len(set(args.temps)) < len(args.temps):
        raise UsageError("--temps names a temperature twice")
    found = read_prompts(args.data or [default_prompts()], args.prompts, args.skip)
    if not found:
        raise UsageError(f"no domain has more than {args.skip} prompts", "lower --skip")
    return found


def follow(line: ProgressLine, done: int, total: int, length: float) -> None:
    """Show how many replies are done, and the accepted length so far."""
    line.show(f"{done} of {total} replies, accepted length {length:.2f}", done, total)


def summary(rounds: Sequence[PlayedRound], block: int) -> dict[str, Any]:
    """Everything ``--json`` prints. ``domains`` has one entry per domain and temperature."""
    from ..training.rounds import accepted_length

    if not rounds:
        raise UsageError("no round was played: every reply ended at once")
    cells = []
    for domain in [*sorted({r.domain for r in rounds} - {"all"}), "all"]:
        for temperature in sorted({r.temperature for r in rounds}):
            chosen = [
                r for r in rounds if domain in (r.domain, "all") and r.temperature == temperature
            ]
            if chosen:
                cells.append(
                    {
                        "domain": domain,
                        "temperature": temperature,
                        "rounds": len(chosen),
                        "accepted_length": accepted_length(chosen),
                        "survival": survival(chosen, block),
                    }
                )
    return {"block": block, "domains": cells, "positions": calibration_errors(rounds, block)}


def survival(rounds: Sequence[PlayedRound], block: int) -> list[float]:
    """For k = 1..block, the share of the rounds drafted so far that accepted positions 1..k."""
    from ..training.rounds import by_position

    seen = by_position(rounds, block)
    return [sum(r.accepted > k for r in s) / len(s) if s else 0.0 for k, s in enumerate(seen)]


def calibration_errors(rounds: Sequence[PlayedRound], block: int) -> list[dict[str, Any]]:
    """Predicted and observed survival of each position, with ECE and AUC."""
    from ..draft.dspark.calibration_fit import auc, ece
    from ..training.rounds import by_position

    out = []
    for k, seen in enumerate(by_position(rounds, block)):
        if not seen:
            continue
        predicted = [r.survival[k] for r in seen]
        accepted = [float(r.accepted > k) for r in seen]
        out.append(
            {
                "position": k + 1,
                "rounds": len(seen),
                "predicted": sum(predicted) / len(predicted),
                "observed": sum(accepted) / len(accepted),
                "ece": ece(predicted, accepted),
                "auc": number_or_none(auc(predicted, accepted)),
            }
        )
    return out


def number_or_none(value: float) -> float | None:
    """``value``, which JSON cannot hold if it is NaN."""
    return None if math.isnan(value) else value


def table(result: dict[str, Any]) -> str:
    """The same for a person."""
    from ..bench.text_tables import number, text_table

    positions = range(result["block"])
    domains = text_table(
        ["domain", "temp", "rounds", "accepted", *(f"1..{k + 1}" for k in positions)],
        [
            [
                cell["domain"],
                number(cell["temperature"], 1),
                str(cell["rounds"]),
                number(cell["accepted_length"]),
                *(number(share) for share in cell["survival"]),
            ]
            for cell in result["domains"]
        ],
    )
    columns = ("predicted", "observed", "ece", "auc")
    errors = text_table(
        ["position", "rounds", "predicted", "observed", "ECE", "AUC"],
        [
            [str(row["position"]), str(row["rounds"]), *(number(row[c], 3) for c in columns)]
            for row in result["positions"]
        ],
    )
    state = "calibrated" if result["calibrated"] else "not calibrated"
    return (
        "accepted: tokens per round; 1..k: share of rounds that accepted draft tokens 1..k\n"
        f"{domains}\n\nsurvival of each position, {state}\n{errors}"
    )
