"""``dspark calibrate``: make a drafter's confidences mean what they say.

Plays held-out rounds, fits one temperature a position (sequential temperature
scaling, paper section 3.2.1) on one half of the prompts, reports the error on the
other half, and writes ``calibration.json`` beside the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .eval import follow
from .options import add_model_flags, load_options
from .rounds import Round, add_prompt_flags, make_engine, play, positions, prompts_of


def configure(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser, decoding=False)
    add_prompt_flags(parser, prompts=24)


def run(args: argparse.Namespace) -> int:
    folder = Path(args.drafter) if args.drafter else None
    if folder is None or not folder.is_dir():
        raise UsageError(
            "calibrate needs --drafter DIR, a folder it can write calibration.json into"
        )
    prompts = prompts_of(args)
    engine, pair = make_engine(load_options(args), calibrated=False, rows=args.rows)
    block = pair.drafter.block_size
    halves = [
        play(engine, prompts[half::2], args.temps, args.max_tokens, seed=args.seed, on_reply=follow)
        for half in (0, 1)
    ]
    result = calibrate(halves[0], halves[1], block)
    write(folder, result, halves[1])
    print(json.dumps(result, indent=2) if args.json else table(result))
    return 0


def calibrate(fitted: Sequence[Round], tested: Sequence[Round], block: int) -> dict[str, Any]:
    """Fit on one half, judge on the other. Raises UsageError with too few rounds."""
    import numpy as np

    from ..schedule.calibration import fit

    confidence = np.full((len(fitted), block), 0.5)
    for i, r in enumerate(fitted):
        confidence[i, : r.drafted] = r.confidence
    found = fit(confidence, [r.accepted for r in fitted], [r.drafted for r in fitted])
    temps = found.temperatures
    return {
        "temperatures": list(temps),
        "rounds": len(fitted),
        "held_out_rounds": len(tested),
        "positions": [
            measure(tested, k, temps) for k, seen in enumerate(positions(tested, block)) if seen
        ],
    }


def survivals(
    rounds: Sequence[Round], k: int, temps: Sequence[float]
) -> tuple[list[float], list[float], list[float]]:
    """Raw and calibrated survival of position k, and whether it stood."""
    import numpy as np

    from ..schedule.calibration import apply

    seen = [r for r in rounds if r.drafted > k]
    raw = np.array([r.confidence[: k + 1] for r in seen])
    stood = [float(r.accepted > k) for r in seen]
    return (
        raw.prod(1).tolist(),
        apply(raw, temps[: k + 1]).prod(1).tolist(),
        stood,
    )


def measure(rounds: Sequence[Round], k: int, temps: Sequence[float]) -> dict[str, Any]:
    from ..schedule.calibration import auc, ece

    raw, fixed, stood = survivals(rounds, k, temps)
    areas = [auc(p, stood) for p in (raw, fixed)]
    return {
        "position": k + 1,
        "rounds": len(stood),
        "observed": sum(stood) / len(stood),
        "predicted_before": sum(raw) / len(raw),
        "predicted_after": sum(fixed) / len(fixed),
        "ece_before": ece(raw, stood),
        "ece_after": ece(fixed, stood),
        "auc_before": None if areas[0] != areas[0] else areas[0],
        "auc_after": None if areas[1] != areas[1] else areas[1],
    }


def write(folder: Path, result: dict[str, Any], tested: Sequence[Round]) -> None:
    """``calibration.json`` and ``reliability.svg``, each whole or not at all."""
    for name, text in (
        ("calibration.json", json.dumps(result, indent=2) + "\n"),
        ("reliability.svg", picture(result, tested)),
    ):
        scratch = folder / f".{name}.tmp"
        try:
            scratch.write_text(text, encoding="utf-8")
            os.replace(scratch, folder / name)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise UsageError(f"cannot write {folder / name}: {error.strerror}") from None


def table(result: dict[str, Any]) -> str:
    lines = [
        f"fitted on {result['rounds']} rounds, judged on {result['held_out_rounds']} others",
        "position  temperature  observed   before    after    ECE before  after    AUC",
    ]
    for row in result["positions"]:
        area = "    -" if row["auc_after"] is None else f"{row['auc_after']:.3f}"
        lines.append(
            f"{row['position']:>8} {result['temperatures'][row['position'] - 1]:>12.2f} "
            f"{row['observed']:>9.3f} {row['predicted_before']:>8.3f} "
            f"{row['predicted_after']:>8.3f} {row['ece_before']:>13.3f} {row['ece_after']:>6.3f}"
            f"  {area}"
        )
    return "\n".join(lines)


def picture(result: dict[str, Any], tested: Sequence[Round]) -> str:
    """Reliability diagrams, one a position: predicted against observed, before and after."""
    from ..schedule.calibration import reliability

    size, gap, body = 170, 40, []
    for row in result["positions"]:
        k = row["position"] - 1
        raw, fixed, stood = survivals(tested, k, result["temperatures"])
        x0 = gap + k * (size + gap)
        body.append(
            f'<text x="{x0}" y="20">position {k + 1}</text>'
            f'<rect x="{x0}" y="{gap}" width="{size}" height="{size}" fill="none" stroke="#999"/>'
            f'<path d="M{x0} {gap + size}L{x0 + size} {gap}" stroke="#bbb"/>'
        )
        for told, colour in ((raw, "#efb118"), (fixed, "#4269d0")):
            bins = reliability(told, stood, 10)
            line = " ".join(
                f"{x0 + b.predicted * size:.1f},{gap + (1 - b.observed) * size:.1f}" for b in bins
            )
            body.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
            body += [
                f'<circle cx="{x0 + b.predicted * size:.1f}" '
                f'cy="{gap + (1 - b.observed) * size:.1f}" fill="{colour}" '
                f'r="{1.5 + 6 * (b.count / len(stood)) ** 0.5:.1f}" fill-opacity="0.7"/>'
                for b in bins
            ]
    width = gap + len(result["positions"]) * (size + gap)
    key = (
        f'<text x="{gap}" y="{2 * gap + size}" fill="#efb118">as drafted</text>'
        f'<text x="{gap + 90}" y="{2 * gap + size}" fill="#4269d0">calibrated</text>'
        f'<text x="{gap + 180}" y="{2 * gap + size}">'
        "across: predicted survival, up: observed</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{2 * gap + size + 20}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(body)}{key}</svg>\n"
    )
