"""Real speculative rounds on prompts, recorded for ``eval`` and ``calibrate``.

Every round verifies the whole draft, so that each position is seen whenever the
ones before it stood.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..events import Finished, StepDone
from ..request import Request, SamplingParams
from .numbers import temperatures

if TYPE_CHECKING:
    from ..loading import LoadOptions

ROWS = 8  # replies decoded together


@dataclass(frozen=True)
class Prompt:
    """A conversation to answer and where it belongs."""

    messages: tuple[dict[str, str], ...]
    domain: str


@dataclass(frozen=True)
class Round:
    """One drafted block and what became of it; ``committed`` counts the target's own token.

    ``peaks``: logits of the slots' largest probabilities, where they were noted.
    """

    domain: str
    temperature: float
    confidence: tuple[float, ...]
    survival: tuple[float, ...]
    drafted: int
    accepted: int
    committed: int
    peaks: tuple[float, ...] = ()


def add_prompt_flags(parser: argparse.ArgumentParser, prompts: int) -> None:
    """Which prompts to answer, and how."""
    add = parser.add_argument
    add(
        "--data",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="jsonl of prompts the drafter was not trained on (default: a small set of our own)",
    )
    add("--prompts", type=int, default=prompts, metavar="N", help="a domain (default %(default)s)")
    add("--skip", type=int, default=0, metavar="N", help="leave out the first N of each domain")
    add(
        "--temps",
        type=temperatures,
        default=(0.0, 0.7, 1.0),
        metavar="T,T",
        help="temperatures (default 0,0.7,1.0)",
    )
    add("--max-tokens", type=int, default=128, metavar="N", help="a reply (default %(default)s)")
    add("--rows", type=int, default=ROWS, metavar="N", help="replies together (%(default)s)")
    add("--seed", type=int, default=0, metavar="N")
    add("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(method="dspark", schedule="fixed", profile=False)


def prompts_of(args: argparse.Namespace) -> list[Prompt]:
    """What the flags ask for. Raises UsageError where that is nothing."""
    for name in ("prompts", "max_tokens", "rows"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1")
    if len(set(args.temps)) < len(args.temps):
        raise UsageError("--temps names a temperature twice")
    if args.skip < 0:
        raise UsageError("--skip must not be negative")
    found = read_prompts(args.data or [default_prompts()], args.prompts, args.skip)
    if not found:
        raise UsageError(f"no prompts are left behind the first {args.skip} of each domain")
    return found


def default_prompts() -> Path:
    return Path(str(resources.files("dspark_mlx"))) / "data" / "prompts.jsonl"


def read_prompts(files: Sequence[Path], most: int, skip: int = 0) -> list[Prompt]:
    """``most`` prompts of every domain, behind the first ``skip``; domains in turn."""
    from ..training.data import answer_in_messages, read_records

    groups: dict[str, list[Prompt]] = {}
    for record in map(answer_in_messages, read_records(files)):
        if not record.messages:
            raise UsageError("plain text is no prompt", "use prompt, messages or turns")
        group = groups.setdefault(record.domain, [])
        if len(group) < skip + most:
            group.append(Prompt(record.messages, record.domain))
    groups = {name: group[skip:] for name, group in groups.items()}
    longest = max(map(len, groups.values()), default=0)
    return [group[i] for i in range(longest) for group in groups.values() if i < len(group)]


def evaluation_engine(
    options: LoadOptions, *, calibrated: bool, rows: int = ROWS
) -> tuple[Any, Any]:
    """An engine that verifies whole drafts, and its pair.

    Not ``calibrated``: the drafter alone, its confidences as drafted.
    """
    from ..loading import engine_options, load_pair, make_engine
    from ..registry import Registry
    from ..schedule import Fixed

    options = dataclasses.replace(
        options, method="dspark", max_rows=rows, copy=options.copy and calibrated
    )
    entry = Registry.load().resolve(options.model)
    pair = load_pair(entry, options)
    if not calibrated and pair.drafter is not None:
        pair.drafter.network.calibration = None
    made = make_engine(pair, Fixed(None), thinking=entry.thinking, **engine_options(pair, options))
    return made, pair


def play(
    engine: Any,
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
    max_tokens: int,
    *,
    seed: int = 0,
    on_reply: Callable[[int, int, float], None] = lambda done, total, length: None,
) -> list[Round]:
    """Answer every prompt at every temperature; the rounds of all replies.

    ``on_reply`` hears of each finished reply: how many, of how many, and the
    accepted length so far.
    """
    kinds: dict[str, tuple[str, float]] = {}
    for i, prompt in enumerate(prompts):
        for temperature in temperatures:
            name = f"{i}@{temperature}"
            kinds[name] = prompt.domain, temperature
            engine.submit(
                Request(
                    id=name,
                    messages=prompt.messages,
                    max_tokens=max_tokens,
                    sampling=SamplingParams(temperature=temperature, seed=seed + i),
                )
            )
    rounds: list[Round] = []
    done = 0
    drafts = engine.batch.proposers["dspark"].record = []
    while engine.active:
        for event in engine.step():
            if isinstance(event, StepDone):
                noted = drafts.pop().peaks if drafts else None
                peaks = [()] * len(event.rows) if noted is None else noted.tolist()
                for row, peak in zip(event.rows, peaks, strict=True):
                    if row.scheduled:
                        rounds.append(_round(row, *kinds[row.request_id], peak))
            elif isinstance(event, Finished):
                if event.reason == "error":
                    raise UsageError(event.message, event.hint)
                done += 1
                on_reply(done, len(kinds), accepted_length(rounds))
    return rounds


def _round(row: Any, domain: str, temperature: float, peaks: Sequence[float]) -> Round:
    return Round(
        domain,
        temperature,
        row.confidence[: row.scheduled],
        row.survival[: row.scheduled],
        row.scheduled,
        row.accepted,
        len(row.tokens),
        tuple(peaks[: row.scheduled]),
    )


def accepted_length(rounds: Sequence[Round]) -> float:
    """Tokens committed a round, the target's own included."""
    return sum(r.committed for r in rounds) / len(rounds) if rounds else 0.0


def positions(rounds: Sequence[Round], block: int) -> list[list[Round]]:
    """For each position the rounds whose draft went that far."""
    return [[r for r in rounds if r.drafted > k] for k in range(block)]
