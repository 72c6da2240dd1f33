"""``dspark calibrate``: make a drafter's confidences mean what they say.

Plays held-out rounds, fits temperature and offset of every position (sequential
temperature scaling, paper section 3.2.1) on one half of the prompts and reports the
error on the other half. A fit that holds there is made once more, on both halves, and
written as ``calibration.json`` beside the checkpoint.
A second fit first blends each confidence with how decided the drafter itself was at
the slot, and is kept where that tells more. Greedy and sampled replies accept by
different rules and are fitted apart.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .eval import follow
from .options import add_model_flags, load_options
from .reliability import Diagram, picture
from .rounds import Round, add_prompt_flags, evaluation_engine, play, positions, prompts_of

KINDS = ("greedy", "sampled")


def configure(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser, decoding=False)
    add_prompt_flags(parser, prompts=24)
    parser.add_argument(
        "--no-offsets",
        dest="offsets",
        action="store_false",
        help="temperatures alone, as in the paper",
    )


def run(args: argparse.Namespace) -> int:
    folder = Path(args.drafter) if args.drafter else None
    if folder is None or not folder.is_dir():
        raise UsageError(
            "calibrate needs --drafter DIR, a folder it can write calibration.json into"
        )
    prompts = prompts_of(args)
    engine, pair = evaluation_engine(load_options(args), calibrated=False, rows=args.rows)
    block = pair.drafter.network.block_size
    halves = [
        play(engine, prompts[half::2], args.temps, args.max_tokens, seed=args.seed, on_reply=follow)
        for half in (0, 1)
    ]
    result = calibrate(halves[0], halves[1], block, offsets=args.offsets)
    write(folder, result, halves[1])
    print(json.dumps(result, indent=2) if args.json else table(result))
    return 0


def calibrate(
    fitted: Sequence[Round], tested: Sequence[Round], block: int, *, offsets: bool = True
) -> dict[str, Any]:
    """Fit on one half, judge on the other: ``{"greedy": ..., "sampled": ...}``.

    Raises UsageError with too few rounds of a kind, or none at all.
    """
    from ..draft.dspark.calibration_fit import MIN_ROUNDS, MIN_TESTED

    result: dict[str, Any] = {}
    for name in KINDS:
        ours, others = of_kind(fitted, name), of_kind(tested, name)
        if len(ours) >= MIN_ROUNDS and len(others) < MIN_TESTED:
            raise UsageError(
                f"{len(others)} {name} rounds are too few to judge a fit by; "
                f"{MIN_TESTED} are needed",
                "give more --prompts, or longer replies",
            )
        if ours:
            result[name] = _fit(ours, others, block, offsets)
    if not result:
        raise UsageError("no round was played: every reply ended at once")
    return result


def of_kind(rounds: Sequence[Round], name: str) -> list[Round]:
    """The rounds of greedy, or of sampled, replies."""
    return [r for r in rounds if (r.temperature == 0) == (name == "greedy")]


def _fit(
    fitted: Sequence[Round], tested: Sequence[Round], block: int, offsets: bool
) -> dict[str, Any]:
    drafted = {"temperatures": [1.0] * block, "offsets": [0.0] * block, "peaks": [0.0] * block}
    # What was learned on one half is kept if it holds on the other: survivals are more
    # honest than as drafted, and tell more than any kept before.
    way, half, rows = -1, drafted, _judge(tested, block, drafted)
    for i, found in enumerate(_scales(fitted, block, offsets)):
        judged = _judge(tested, block, found)
        honest = _total(judged, "ece_after") < _total(judged, "ece_before")
        if honest and _total(judged, "loss_after") < _total(rows, "loss_after"):
            way, half, rows = i, found, judged
    whole = drafted if way < 0 else [*_scales([*fitted, *tested], block, offsets)][way]
    return {
        **whole,
        "as_drafted": way < 0,
        "rounds": len(fitted) + len(tested),
        "held_out_rounds": len(tested),
        "held_out_scale": half,  # of the other half alone, as judged in positions
        "positions": rows,
    }


def _scales(rounds: Sequence[Round], block: int, offsets: bool) -> Iterator[dict[str, list[float]]]:
    """Sequential temperature scaling of the confidences, and of their blend with the peaks."""
    import numpy as np

    from ..draft.dspark.calibration_fit import blend, fit

    confidence, peaks = np.full((len(rounds), block), 0.5), np.zeros((len(rounds), block))
    for i, r in enumerate(rounds):
        confidence[i, : r.drafted] = r.confidence
        peaks[i, : len(r.peaks)] = r.peaks
    accepted, reached = [r.accepted for r in rounds], [r.drafted for r in rounds]
    found = fit(confidence, accepted, reached, offsets=offsets)
    yield {
        "temperatures": list(found.temperatures),
        "offsets": list(found.offsets),
        "peaks": [0.0] * block,
    }
    if not offsets or not all(r.peaks for r in rounds):
        return
    mixed = blend(confidence, peaks, accepted, reached)
    found = fit(mixed.apply(confidence, peaks), accepted, reached, offsets=True)
    heat = np.array(found.temperatures)
    yield {
        "temperatures": (heat / mixed.slopes).tolist(),
        "offsets": (mixed.offsets / heat + found.offsets).tolist(),
        "peaks": (mixed.weights / heat).tolist(),
    }


def _total(rows: Sequence[dict[str, Any]], name: str) -> float:
    return float(sum(row[name] for row in rows))


def _judge(rounds: Sequence[Round], block: int, scale: dict[str, Any]) -> list[dict[str, Any]]:
    return [measure(rounds, k, scale) for k, seen in enumerate(positions(rounds, block)) if seen]


def survivals(
    rounds: Sequence[Round], k: int, scale: dict[str, Any]
) -> tuple[list[float], list[float], list[float]]:
    """Raw and calibrated survival of position k, and whether it stood."""
    import numpy as np

    from ..draft.dspark.calibration_fit import apply

    seen = [r for r in rounds if r.drafted > k]
    raw = np.array([r.confidence[: k + 1] for r in seen])
    more: Any = 0.0
    if any(scale["peaks"]):
        more = np.array([r.peaks[: k + 1] for r in seen]) * np.array(scale["peaks"][: k + 1])
    stood = [float(r.accepted > k) for r in seen]
    return (
        raw.prod(1).tolist(),
        apply(raw, scale["temperatures"], scale["offsets"], more).prod(1).tolist(),
        stood,
    )


def measure(rounds: Sequence[Round], k: int, scale: dict[str, Any]) -> dict[str, Any]:
    from ..draft.dspark.calibration_fit import auc, ece, log_loss

    raw, fixed, stood = survivals(rounds, k, scale)
    areas = [auc(p, stood) for p in (raw, fixed)]
    return {
        "position": k + 1,
        "rounds": len(stood),
        "observed": sum(stood) / len(stood),
        "predicted_before": sum(raw) / len(raw),
        "predicted_after": sum(fixed) / len(fixed),
        "ece_before": ece(raw, stood),
        "ece_after": ece(fixed, stood),
        "loss_before": log_loss(raw, stood),
        "loss_after": log_loss(fixed, stood),
        "auc_before": None if areas[0] != areas[0] else areas[0],
        "auc_after": None if areas[1] != areas[1] else areas[1],
    }


def write(folder: Path, result: dict[str, Any], tested: Sequence[Round]) -> None:
    """``calibration.json`` and ``reliability.svg``, each whole or not at all."""
    rows = [
        [
            Diagram(
                f"{name}, position {k + 1}",
                *survivals(of_kind(tested, name), k, part["held_out_scale"]),
            )
            for k in range(len(part["positions"]))
        ]
        for name, part in result.items()
    ]
    for file, text in (
        ("calibration.json", json.dumps(result, indent=2) + "\n"),
        ("reliability.svg", picture(rows)),
    ):
        scratch = folder / f".{file}.tmp"
        try:
            scratch.write_text(text, encoding="utf-8")
            os.replace(scratch, folder / file)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise UsageError(f"cannot write {folder / file}: {error.strerror}") from None


def table(result: dict[str, Any]) -> str:
    lines = []
    for name, part in result.items():
        lines += [
            f"{name}: fitted on {part['rounds']} rounds; judged on {part['held_out_rounds']} "
            "of them, by a fit of the others"
            + (": no fit was better, kept as drafted" if part["as_drafted"] else ""),
            "position  temperature  offset  peaks  observed   before    after    ECE before  after"
            "    AUC before  after",
        ]
        for row in part["positions"]:
            at = row["position"] - 1
            areas = [
                "-" if row[n] is None else f"{row[n]:.3f}" for n in ("auc_before", "auc_after")
            ]
            lines.append(
                f"{row['position']:>8} {part['temperatures'][at]:>12.2f} "
                f"{part['offsets'][at]:>7.2f} {part['peaks'][at]:>6.2f} "
                f"{row['observed']:>9.3f} {row['predicted_before']:>8.3f} "
                f"{row['predicted_after']:>8.3f} {row['ece_before']:>13.3f} "
                f"{row['ece_after']:>6.3f} {areas[0]:>13} {areas[1]:>6}"
            )
    return "\n".join(lines)
