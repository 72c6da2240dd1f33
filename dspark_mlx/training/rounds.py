"""Real speculative rounds on held-out prompts, recorded for ``dspark eval`` and ``calibrate``.

Every round verifies the whole draft, so each position is tested whenever the positions before it
were accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ..draft.dspark.network import Drafter
from ..engine.engine import Engine
from ..errors import UsageError
from ..events import Finished, RowStep, StepDone
from ..loading import LoadOptions, engine_options, load_pair, make_engine
from ..registry import Registry
from ..request import Request, SamplingParams
from ..schedule import Fixed
from .data import answer_in_messages, read_records


@dataclass(frozen=True)
class HeldOutPrompt:
    """A conversation to answer, and its domain."""

    messages: tuple[dict[str, str], ...]
    domain: str


@dataclass(frozen=True)
class PlayedRound:
    """One drafted block and what became of it.

    ``committed`` counts the target's own token too. ``peaks`` are the logits of the slots'
    largest probabilities, where the drafter notes them.
    """

    domain: str
    temperature: float
    confidence: tuple[float, ...]
    survival: tuple[float, ...]
    drafted: int
    accepted: int
    committed: int
    peaks: tuple[float, ...] = ()


def default_prompts() -> Path:
    """The small set of prompts that comes with this package."""
    return Path(str(resources.files("dspark_mlx"))) / "data" / "prompts.jsonl"


def read_prompts(files: Sequence[Path], most: int, skip: int = 0) -> list[HeldOutPrompt]:
    """The first ``most`` prompts of each domain after the first ``skip``; domains in turn.

    A conversation that ends with an answer is asked up to that answer.
    """
    groups: dict[str, list[HeldOutPrompt]] = {}
    for record in map(answer_in_messages, read_records(files)):
        if not record.messages:
            raise UsageError("plain text is not a prompt", "use prompt, messages or turns")
        group = groups.setdefault(record.domain, [])
        if len(group) < skip + most:
            group.append(HeldOutPrompt(record.messages, record.domain))
    groups = {name: group[skip:] for name, group in groups.items()}
    longest = max(map(len, groups.values()), default=0)
    return [group[i] for i in range(longest) for group in groups.values() if i < len(group)]


def evaluation_engine(
    options: LoadOptions, *, calibrated: bool, rows: int
) -> tuple[Engine, Drafter]:
    """An engine that verifies whole drafts, ``rows`` replies together, and its drafter.

    Without ``calibrated`` the drafter drafts alone, and its confidences are not calibrated.
    Raises UsageError where there is no drafter.
    """
    options = dataclasses.replace(
        options, method="auto", max_rows=rows, copy=options.copy and calibrated
    )
    entry = Registry.load().resolve(options.model)
    pair = load_pair(entry, options)
    if pair.drafter is None or pair.method != "dspark":
        raise UsageError(f"there is no drafter to test: {pair.reason}", "name one with --drafter")
    network: Drafter = pair.drafter.network
    if not calibrated:
        network.calibration = None
    engine = make_engine(
        pair, Fixed(None), thinking=entry.thinking, **engine_options(pair, options)
    )
    return engine, network


def play(
    engine: Engine,
    prompts: Sequence[HeldOutPrompt],
    temperatures: Sequence[float],
    max_tokens: int,
    *,
    seed: int = 0,
    on_reply: Callable[[int, int, float], None] = lambda done, total, length: None,
) -> list[PlayedRound]:
    """Answer every prompt at every temperature. Returns the rounds of all replies.

    ``on_reply`` is called after each reply with the number of finished replies, of all replies,
    and the accepted length so far.
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
    rounds: list[PlayedRound] = []
    done = 0
    proposer: Any = engine.batch.proposers["dspark"]
    drafts = proposer.record = []
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


def _round(row: RowStep, domain: str, temperature: float, peaks: Sequence[float]) -> PlayedRound:
    return PlayedRound(
        domain,
        temperature,
        row.confidence[: row.scheduled],
        row.survival[: row.scheduled],
        row.scheduled,
        row.accepted,
        len(row.tokens),
        tuple(peaks[: row.scheduled]),
    )


def accepted_length(rounds: Sequence[PlayedRound]) -> float:
    """Tokens committed per round, the target's own included."""
    return sum(r.committed for r in rounds) / len(rounds) if rounds else 0.0


def by_position(rounds: Sequence[PlayedRound], block: int) -> list[list[PlayedRound]]:
    """For each of ``block`` positions, the rounds whose draft reached it."""
    return [[r for r in rounds if r.drafted > k] for k in range(block)]
