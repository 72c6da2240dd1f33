"""``dspark eval``: how much of what a drafter drafts the target accepts, by domain and temperature.

Copies of earlier text included, as the engine drafts; ``--no-copy`` judges the drafter alone.
Real rounds on held-out prompts, the whole block verified each time. Speed is
``dspark bench``'s business.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import UsageError
from .options import add_model_flags, load_options
from .rounds import (
    Round,
    accepted_length,
    add_prompt_flags,
    evaluation_engine,
    play,
    positions,
    prompts_of,
)


def configure(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser, decoding=False)
    add_prompt_flags(parser, prompts=8)


def run(args: argparse.Namespace) -> int:
    prompts = prompts_of(args)
    engine, pair = evaluation_engine(load_options(args), calibrated=True, rows=args.rows)
    rounds = play(engine, prompts, args.temps, args.max_tokens, seed=args.seed, on_reply=follow)
    result = summary(rounds, pair.drafter.network.block_size)
    result |= {"model": args.model, "prompts": len(prompts), "max_tokens": args.max_tokens}
    result["calibrated"] = pair.drafter.network.calibration is not None
    print(json.dumps(result, indent=2) if args.json else table(result))
    return 0


def follow(done: int, total: int, length: float) -> None:
    """One line on stderr, redrawn where there is a terminal."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{done} of {total} replies, accepted {length:.2f}", end=end, file=sys.stderr)


def summary(rounds: Sequence[Round], block: int) -> dict[str, Any]:
    """Everything ``--json`` says. ``domains`` hold one entry a domain and temperature."""
    if not rounds:
        raise UsageError("no round was played: every reply ended at once")
    domains = sorted({r.domain for r in rounds})
    temps = sorted({r.temperature for r in rounds})
    cells = []
    for domain in [*domains, "all"]:
        for temperature in temps:
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
    return {"block": block, "domains": cells, "positions": honesty(rounds, block)}


def survival(rounds: Sequence[Round], block: int) -> list[float]:
    """Share of the rounds that drafted so far in which positions 1..k all stood."""
    seen = positions(rounds, block)
    return [sum(r.accepted > k for r in s) / len(s) if s else 0.0 for k, s in enumerate(seen)]


def honesty(rounds: Sequence[Round], block: int) -> list[dict[str, Any]]:
    """Per position: predicted and observed survival, ECE and AUC of the survival."""
    from ..draft.dspark.calibration_fit import auc, ece

    out = []
    for k, seen in enumerate(positions(rounds, block)):
        if not seen:
            continue
        told = [r.survival[k] for r in seen]
        stood = [float(r.accepted > k) for r in seen]
        area = auc(told, stood)
        out.append(
            {
                "position": k + 1,
                "rounds": len(seen),
                "predicted": sum(told) / len(told),
                "observed": sum(stood) / len(stood),
                "ece": ece(told, stood),
                "auc": None if area != area else area,
            }
        )
    return out


def table(result: dict[str, Any]) -> str:
    """The same for a person."""
    lines = ["domain      temp  rounds  accepted  survival of positions 1.."]
    for cell in result["domains"]:
        shares = " ".join(f"{v:.2f}" for v in cell["survival"])
        lines.append(
            f"{cell['domain']:<10} {cell['temperature']:>5.1f} {cell['rounds']:>7} "
            f"{cell['accepted_length']:>9.2f}  {shares}"
        )
    state = "calibrated" if result["calibrated"] else "not calibrated"
    lines += ["", f"survival, {state}", "position  rounds  predicted  observed    ECE    AUC"]
    for row in result["positions"]:
        area = "     -" if row["auc"] is None else f"{row['auc']:>6.3f}"
        lines.append(
            f"{row['position']:>8} {row['rounds']:>7} {row['predicted']:>10.3f} "
            f"{row['observed']:>9.3f} {row['ece']:>6.3f} {area}"
        )
    return "\n".join(lines)
