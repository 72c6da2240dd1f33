"""``dspark calibrate``: fit a drafter's confidences to how often its draft tokens are accepted.

Plays held-out rounds, fits temperature and offset of each position (sequential
temperature scaling, section 3.2.1 of the paper) on one half of the prompts, and reports the
error on the other half. A fit that lowers the error there is made once more, on both halves, and
written as ``calibration.json`` into the drafter's folder.
A second fit first blends each confidence with the drafter's largest probability at
the slot, and is kept where it predicts better. Greedy and sampled replies accept by
different rules and are fitted apart.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .eval import add_prompt_flags, follow, held_out_prompts, number_or_none
from .options import add_model_flags, load_options
from .output import write_text
from .progress import ProgressLine

if TYPE_CHECKING:
    from ..training.rounds import PlayedRound

KINDS = ("greedy", "sampled")
HEAD = "position temperature offset peaks observed predicted after ECE after AUC after"
CHART_BINS = 10  # of a reliability diagram


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Needs --drafter DIR, the drafter's folder: calibration.json and reliability.svg are "
        "written there, and the engine reads calibration.json with the drafter."
    )
    add_model_flags(parser, decoding=False, draft_model=False)
    add_prompt_flags(parser, prompts=24)
    parser.add_argument(
        "--no-offsets",
        dest="offsets",
        action="store_false",
        help="fit temperatures only, as in the paper",
    )


def run(args: argparse.Namespace) -> int:
    from ..training.rounds import evaluation_engine, play

    folder = Path(args.drafter) if args.drafter else None
    if folder is None or not folder.is_dir():
        raise UsageError(
            "calibrate needs --drafter DIR, a folder it can write calibration.json into"
        )
    prompts = held_out_prompts(args)
    engine, drafter = evaluation_engine(load_options(args), calibrated=False, rows=args.rows)
    with ProgressLine() as line:
        fitted, tested = (
            play(
                engine,
                prompts[half::2],
                args.temps,
                args.max_tokens,
                seed=args.seed,
                on_reply=lambda *done: follow(line, *done),
            )
            for half in (0, 1)
        )
    result = calibrate(fitted, tested, drafter.block_size, offsets=args.offsets)
    write(folder, result, tested)
    print(json.dumps(result, indent=2) if args.json else table(result))
    return 0


def calibrate(
    fitted: Sequence[PlayedRound],
    tested: Sequence[PlayedRound],
    block: int,
    *,
    offsets: bool = True,
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


def of_kind(rounds: Sequence[PlayedRound], name: str) -> list[PlayedRound]:
    """The rounds of greedy, or of sampled, replies."""
    return [r for r in rounds if (r.temperature == 0) == (name == "greedy")]


def _fit(
    fitted: Sequence[PlayedRound], tested: Sequence[PlayedRound], block: int, offsets: bool
) -> dict[str, Any]:
    drafted = {"temperatures": [1.0] * block, "offsets": [0.0] * block, "peaks": [0.0] * block}
    # A fit on one half is kept if, on the other half, the calibration error is lower than as
    # drafted and the log loss lower than with any fit kept before.
    kept, half, rows = -1, drafted, _judge(tested, block, drafted)
    for i, found in enumerate(_fits(fitted, block, offsets)):
        judged = _judge(tested, block, found)
        better = _total(judged, "ece_after") < _total(judged, "ece_before")
        if better and _total(judged, "loss_after") < _total(rows, "loss_after"):
            kept, half, rows = i, found, judged
    whole = drafted if kept < 0 else [*_fits([*fitted, *tested], block, offsets)][kept]
    return {
        **whole,
        "as_drafted": kept < 0,
        "rounds": len(fitted) + len(tested),
        "held_out_rounds": len(tested),
        "held_out_scale": half,  # of the other half alone, as judged in positions
        "positions": rows,
    }


def _fits(
    rounds: Sequence[PlayedRound], block: int, offsets: bool
) -> Iterator[dict[str, list[float]]]:
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


def _judge(
    rounds: Sequence[PlayedRound], block: int, scale: dict[str, Any]
) -> list[dict[str, Any]]:
    from ..training.rounds import by_position

    return [measure(rounds, k, scale) for k, seen in enumerate(by_position(rounds, block)) if seen]


def survivals(
    rounds: Sequence[PlayedRound], k: int, scale: dict[str, Any]
) -> tuple[list[float], list[float], list[float]]:
    """Predicted survival of position k as drafted and calibrated, and 1.0 where it survived."""
    import numpy as np

    from ..draft.dspark.calibration_fit import apply

    seen = [r for r in rounds if r.drafted > k]
    raw = np.array([r.confidence[: k + 1] for r in seen])
    more: Any = 0.0
    if any(scale["peaks"]):
        more = np.array([r.peaks[: k + 1] for r in seen]) * np.array(scale["peaks"][: k + 1])
    calibrated = apply(raw, scale["temperatures"], scale["offsets"], more)
    accepted = [float(r.accepted > k) for r in seen]
    return raw.prod(1).tolist(), calibrated.prod(1).tolist(), accepted


def measure(rounds: Sequence[PlayedRound], k: int, scale: dict[str, Any]) -> dict[str, Any]:
    """How well the survival of position k is predicted, before and after ``scale``."""
    from ..draft.dspark.calibration_fit import auc, ece, log_loss

    before, after, accepted = survivals(rounds, k, scale)
    return {
        "position": k + 1,
        "rounds": len(accepted),
        "observed": sum(accepted) / len(accepted),
        "predicted_before": sum(before) / len(before),
        "predicted_after": sum(after) / len(after),
        "ece_before": ece(before, accepted),
        "ece_after": ece(after, accepted),
        "loss_before": log_loss(before, accepted),
        "loss_after": log_loss(after, accepted),
        "auc_before": number_or_none(auc(before, accepted)),
        "auc_after": number_or_none(auc(after, accepted)),
    }


def write(folder: Path, result: dict[str, Any], tested: Sequence[PlayedRound]) -> None:
    """Write ``calibration.json`` and ``reliability.svg``, each whole or not at all."""
    write_text(folder / "calibration.json", json.dumps(result, indent=2) + "\n")
    write_text(folder / "reliability.svg", reliability_chart(result, tested))


def reliability_chart(result: dict[str, Any], tested: Sequence[PlayedRound]) -> str:
    """An SVG with one row for each kind of reply and one diagram for each position."""
    from ..charts import LineChart, Series, page
    from ..draft.dspark.calibration_fit import reliability

    columns = max(len(part["positions"]) for part in result.values())
    charts: list[LineChart | None] = []
    for name, part in result.items():
        for row in part["positions"]:
            k = row["position"] - 1
            *predictions, accepted = survivals(of_kind(tested, name), k, part["held_out_scale"])
            lines = []
            for title, predicted in zip(("as drafted", "calibrated"), predictions, strict=True):
                bins = reliability(predicted, accepted, CHART_BINS)
                points = tuple((b.predicted, b.observed) for b in bins)
                weights = tuple(b.count / len(accepted) for b in bins)
                lines.append(Series(title, points, weights=weights))
            title = f"{name}, position {k + 1}"
            charts.append(LineChart(title, "predicted", "observed", tuple(lines), diagonal=True))
        charts += [None] * (-len(charts) % columns)
    note = "Survival of each position: predicted (across) and observed (up)."
    return page(charts, note, columns=columns, width=280, height=280, legend="shared")


def table(result: dict[str, Any]) -> str:
    """The same for a person."""
    from ..bench.text_tables import number, text_table

    columns = ("observed", "predicted_before", "predicted_after", "ece_before", "ece_after")
    parts = []
    for name, part in result.items():
        kept = ": no fit was better, kept as drafted" if part["as_drafted"] else ""
        parts += [
            f"{name}: fitted on {part['rounds']} rounds; judged on {part['held_out_rounds']} of "
            f"them, by a fit to the others{kept}",
            text_table(
                HEAD.split(),
                [
                    [
                        str(row["position"]),
                        *(
                            number(part[n][row["position"] - 1])
                            for n in ("temperatures", "offsets", "peaks")
                        ),
                        *(number(row[n], 3) for n in (*columns, "auc_before", "auc_after")),
                    ]
                    for row in part["positions"]
                ],
            ),
        ]
    return "\n".join(parts)
