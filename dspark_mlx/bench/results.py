"""What a benchmark measured: one ``Run`` at a time, summed up per cell, and as JSON. Pure.

A *cell* is one system (a method with its schedule, the baseline or a peer) on one domain at one
temperature and concurrency. A *run* is one group of prompts, ``concurrency`` of them served at
a time. A *repeat* is one pass over all groups.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median
from typing import Any

from ..errors import ModelError
from ..events import Event, Finished, Prefill, StepDone

NO_TIME = 1e-9  # seconds: the least that a rate is divided by


@dataclass(frozen=True, slots=True)
class Run:
    """One group of prompts answered. Seconds are of decoding only, without prefill.

    ``seconds`` are read from the clock of the benchmark; ``wall_seconds`` (0: not known) and its
    parts draft, verify and host from the wall's. ``tokens`` are the replies. ``row_rounds``
    counts rounds of single rows (0: not known, as for a peer); ``drafted``, ``scheduled`` and
    ``accepted`` are sums over those. ``reached`` and ``survived`` count verified and accepted
    tokens by draft position. ``rules`` counts the rounds that each rule of the policy decided.
    """

    tokens: tuple[tuple[int, ...], ...]
    seconds: float
    first_token_seconds: tuple[float, ...]
    row_rounds: int = 0
    drafted: int = 0
    scheduled: int = 0
    accepted: int = 0
    reached: tuple[int, ...] = ()
    survived: tuple[int, ...] = ()
    wall_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    host_seconds: float = 0.0
    rules: tuple[tuple[str, int], ...] = ()

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))


class RunStats:
    """Folds the events of one group's run into a ``Run``."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        self._steps: list[StepDone] = []
        self._tokens: dict[str, list[int]] = {name: [] for name in request_ids}
        self._ends: dict[str, Finished] = {}
        self._seconds = self._wall = 0.0

    def add(self, events: Sequence[Event], wall: float, seconds: float) -> None:
        """The events of one engine step, which took ``wall`` seconds by the wall's clock and
        ``seconds`` by the benchmark's. Where a chunk of prefill was part of the step, the
        share of its round is counted. Raises ModelError for a reply that failed.
        """
        prefilled = any(isinstance(event, Prefill) for event in events)
        for event in events:
            if isinstance(event, StepDone):
                self._steps.append(event)
                share = min(1.0, event.round_seconds / wall) if prefilled and wall > 0 else 1.0
                self._seconds += share * seconds
                self._wall += share * wall
                for row in event.rows:
                    self._tokens[row.request_id] += [t.id for t in row.tokens]
            elif isinstance(event, Finished):
                if event.reason in ("error", "cancelled"):
                    raise ModelError(f"a reply failed: {event.message or event.reason}", event.hint)
                self._ends[event.request_id] = event

    def run(self) -> Run:
        """The whole run, once every request has finished."""
        ends = [self._ends[name] for name in self._tokens]
        steps = self._steps
        return Run(
            tokens=tuple(map(tuple, self._tokens.values())),
            seconds=self._seconds,
            first_token_seconds=tuple(e.first_token_seconds for e in ends),
            row_rounds=sum(e.rounds for e in ends),
            drafted=sum(e.drafted for e in ends),
            scheduled=sum(e.scheduled for e in ends),
            accepted=sum(e.accepted for e in ends),
            reached=_by_position([e.reached for e in ends]),
            survived=_by_position([e.survived for e in ends]),
            wall_seconds=self._wall,
            draft_seconds=sum(s.draft_seconds for s in steps),
            verify_seconds=sum(s.verify_seconds for s in steps),
            host_seconds=sum(s.host_seconds for s in steps),
            rules=tuple(sorted(Counter(s.rule or s.policy for s in steps).items())),
        )


@dataclass(frozen=True, slots=True)
class CellName:
    system: str
    domain: str
    temperature: float
    concurrency: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a reply left the reference.

    ``margin`` is how far the target's best choice was ahead of its second there, in logits;
    ``near_tie``: rounding alone explains so small a margin.
    """

    system: str
    prompt: str
    position: int
    margin: float
    near_tie: bool
    temperature: float = 0.0
    concurrency: int = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """The runs of a cell in figures; None where a figure is not known.

    ``tps`` is tokens/s, the median over repeats, from the slowest (``tps_low``) to the fastest
    whole repeat (``tps_high``). ``ratio`` is against the baseline's rate, its range against
    the same repeat's. Lengths are tokens a row and round; ``accepted_length`` counts the
    target's own token too. Shares are of the rounds' time; building the graph of the model
    takes the rest.
    """

    name: CellName
    replies: int
    tokens: int
    tps: float
    tps_low: float | None
    tps_high: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    first_token_seconds: float
    accepted_length: float | None
    drafted_length: float | None
    scheduled_length: float | None
    acceptance: tuple[float, ...]
    waste: float | None
    draft_share: float | None
    verify_share: float | None
    host_share: float | None
    rules: dict[str, int]


@dataclass(slots=True)
class Results:
    """Everything of one benchmark. ``runs[cell][repeat]`` lists its groups.

    ``systems`` is the order in which they are shown, the baseline first.
    """

    about: dict[str, Any]
    baseline: str
    runs: dict[CellName, list[list[Run]]] = field(default_factory=dict)
    forks: list[Fork] = field(default_factory=list)
    compared: int = 0
    notes: list[str] = field(default_factory=list)
    systems: list[str] = field(default_factory=list)
    stopped: bool = False

    def add(self, name: CellName, repeat: int, run: Run) -> None:
        repeats = self.runs.setdefault(name, [])
        while len(repeats) <= repeat:
            repeats.append([])
        repeats[repeat].append(run)

    @property
    def lossless(self) -> bool:
        """No reply left the reference except at a near-tie."""
        return all(fork.near_tie for fork in self.forks)

    def cells(self) -> list[Cell]:
        """Every cell, in the order of the systems."""
        order = {system: n for n, system in enumerate(self.systems)}
        names = sorted(self.runs, key=lambda name: order.get(name.system, len(order)))
        return [self.cell([name]) for name in names]

    def cell(self, names: Sequence[CellName], domain: str | None = None) -> Cell:
        """The cells ``names`` of one system as one cell of ``domain`` (None: the first's)."""
        base = [dataclasses.replace(name, system=self.baseline) for name in names]
        merged = dataclasses.replace(names[0], domain=domain or names[0].domain)
        have_base = all(name in self.runs for name in base)
        return summarise(merged, self._merge(names), self._merge(base) if have_base else ())

    def _merge(self, names: Sequence[CellName]) -> list[list[Run]]:
        repeats = zip_longest(*(self.runs[name] for name in names), fillvalue=())
        return [[run for group in groups for run in group] for groups in repeats]

    def to_json(self) -> dict[str, Any]:
        return {
            "about": self.about,
            "baseline": self.baseline,
            "lossless": self.lossless,
            "compared": self.compared,
            "forks": [dataclasses.asdict(fork) for fork in self.forks],
            "notes": self.notes,
            "cells": [dataclasses.asdict(cell) for cell in self.cells()],
        }


def summarise(
    name: CellName, repeats: Sequence[Sequence[Run]], base: Sequence[Sequence[Run]] = ()
) -> Cell:
    """The figures of one cell; ``base`` are the baseline's runs of the same prompts."""
    rates = [_rate(runs) for runs in repeats if runs]
    ratios = [_rate(a) / _rate(b) for a, b in zip(repeats, base, strict=False) if a and b]
    tps = _typical_rate(repeats)
    runs = [run for group in repeats for run in group]
    tokens = sum(run.count for run in runs)
    rounds = sum(run.row_rounds for run in runs)
    scheduled = sum(run.scheduled for run in runs)
    seconds = sum(run.wall_seconds for run in runs)
    rules: Counter[str] = Counter()
    for run in runs:
        rules.update(dict(run.rules))

    def a_round(total: float) -> float | None:
        return total / rounds if rounds else None

    def share(total: float) -> float | None:
        return total / seconds if rounds and seconds else None

    return Cell(
        name=name,
        replies=sum(len(run.tokens) for run in runs),
        tokens=tokens,
        tps=tps,
        tps_low=min(rates) if len(rates) > 1 else None,
        tps_high=max(rates) if len(rates) > 1 else None,
        ratio=tps / _typical_rate(base) if ratios else None,
        ratio_low=min(ratios) if len(ratios) > 1 else None,
        ratio_high=max(ratios) if len(ratios) > 1 else None,
        first_token_seconds=median(s for run in runs for s in run.first_token_seconds),
        accepted_length=a_round(tokens),
        drafted_length=a_round(sum(run.drafted for run in runs)),
        scheduled_length=a_round(scheduled),
        acceptance=_acceptance(runs),
        waste=1 - sum(run.accepted for run in runs) / scheduled if scheduled else None,
        draft_share=share(sum(run.draft_seconds for run in runs)),
        verify_share=share(sum(run.verify_seconds for run in runs)),
        host_share=share(sum(run.host_seconds for run in runs)),
        rules=dict(rules),
    )


def _typical_rate(repeats: Sequence[Sequence[Run]]) -> float:
    """Tokens/s where every group takes the median time of its repeats.

    So a hiccup in one run is outvoted by the other runs of the same group.
    """
    groups = [[run for run in group if run] for group in zip_longest(*repeats)]
    tokens = sum(median(run.count for run in group) for group in groups)
    return float(tokens / max(NO_TIME, sum(median(r.seconds for r in group) for group in groups)))


def _rate(runs: Sequence[Run]) -> float:
    """Tokens/s over several groups."""
    return sum(run.count for run in runs) / max(NO_TIME, sum(run.seconds for run in runs))


def _acceptance(runs: Sequence[Run]) -> tuple[float, ...]:
    """Of the tokens verified at each draft position, the share that was accepted."""
    reached = _by_position([run.reached for run in runs])
    survived = _by_position([run.survived for run in runs])
    return tuple(s / r for r, s in zip(reached, survived, strict=False) if r)


def _by_position(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The sums of ``counts`` position by position, as long as the longest of them."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))
