"""What a benchmark measured: one ``Run`` at a time, summed up per cell, and as JSON. Pure.

A *cell* is one side (a method with its schedule, the baseline or a peer) on one
domain at one temperature and concurrency. A *run* is one group of prompts,
so many of them served at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median
from typing import Any

from .shape import Shape, usual_prices


@dataclass(frozen=True, slots=True)
class Run:
    """One group of prompts answered. Seconds are decoding only, prefill apart.

    ``seconds`` are by the benchmark's clock; ``wall_seconds`` (0: not known) and its parts
    draft, verify and host are by the wall's.

    ``tokens`` are the replies. ``row_rounds`` counts rounds of single rows (0:
    not known, as for a peer); the other counts are sums over those. ``reached``
    and ``survived`` count verified and accepted tokens by draft position.
    ``rounds`` are the seconds of each, under what its price depends on (``Shape``).
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
    joules: float | None = None
    rules: tuple[tuple[str, int], ...] = ()
    rounds: tuple[tuple[Shape, float], ...] = ()

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))


@dataclass(frozen=True, slots=True)
class CellName:
    side: str
    domain: str
    temperature: float
    concurrency: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a reply left the reference. ``margin``: the target's top-2 logit difference there.

    ``near_tie``: so small that rounding alone explains it.
    """

    side: str
    prompt: str
    position: int
    margin: float
    near_tie: bool
    temperature: float = 0.0
    concurrency: int = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """The runs of a cell in figures. Rates take medians over repeats; the range is that of
    whole repeats, where there were several.

    ``ratio`` is against the baseline's rate, its range against the same repeat's.
    ``accepted_length`` counts the target's own token too. Shares are of the
    rounds' time; what is left is the model's graph being built.
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
    joules_per_token: float | None
    rules: dict[str, int]


@dataclass(slots=True)
class Results:
    """Everything of one benchmark. ``runs[cell][repeat]`` lists its groups.

    ``sides`` is the order in which they are shown, the baseline first.
    """

    about: dict[str, Any]
    baseline: str
    runs: dict[CellName, list[list[Run]]] = field(default_factory=dict)
    forks: list[Fork] = field(default_factory=list)
    compared: int = 0
    notes: list[str] = field(default_factory=list)
    sides: list[str] = field(default_factory=list)
    stopped: bool = False

    def add(self, name: CellName, repeat: int, run: Run) -> None:
        repeats = self.runs.setdefault(name, [])
        while len(repeats) <= repeat:
            repeats.append([])
        repeats[repeat].append(run)

    @property
    def lossless(self) -> bool:
        """No reply left the reference but at a near-tie."""
        return all(fork.near_tie for fork in self.forks)

    def cells(self) -> list[Cell]:
        """Every cell, its sides in their order."""
        order = {side: n for n, side in enumerate(self.sides)}
        names = sorted(self.runs, key=lambda name: order.get(name.side, len(order)))
        return [self.cell(name) for name in names]

    def cell(self, name: CellName) -> Cell:
        base = dataclasses.replace(name, side=self.baseline)
        return summarise(name, self.runs[name], self.runs.get(base))

    def evened(self) -> Results:
        """The same runs with every round at the usual price of its shape.

        What is left is what the sides chose, without the ups and downs of the
        machine while they ran. Runs without rounds (the baseline's, a peer's) stay.
        """
        every = [run for repeats in self.runs.values() for runs in repeats for run in runs]
        price = usual_prices([run.rounds for run in every if run.rounds])

        def even(run: Run) -> Run:
            if not run.rounds:
                return run
            return dataclasses.replace(run, seconds=sum(price[shape] for shape, _ in run.rounds))

        runs = {
            name: [[even(run) for run in group] for group in repeats]
            for name, repeats in self.runs.items()
        }
        return dataclasses.replace(self, runs=runs)

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
    name: CellName, repeats: Sequence[Sequence[Run]], base: Sequence[Sequence[Run]] | None = None
) -> Cell:
    """The figures of one cell; ``base`` are the baseline's runs of the same prompts."""
    rates = [rate(runs) for runs in repeats if runs]
    pairs = [rate(a) / rate(b) for a, b in zip(repeats, base or (), strict=False) if a and b]
    tps = typical_rate(repeats)
    runs = [run for group in repeats for run in group]
    tokens = sum(run.count for run in runs)
    rounds = sum(run.row_rounds for run in runs)
    scheduled = sum(run.scheduled for run in runs)
    accepted = sum(run.accepted for run in runs)
    seconds = sum(run.wall_seconds for run in runs)
    joules = [run.joules for run in runs if run.joules is not None]
    rules: dict[str, int] = {}
    for run in runs:
        for rule, times in run.rules:
            rules[rule] = rules.get(rule, 0) + times

    def mean(total: float) -> float | None:
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
        ratio=tps / typical_rate(base) if pairs and base else None,
        ratio_low=min(pairs) if len(pairs) > 1 else None,
        ratio_high=max(pairs) if len(pairs) > 1 else None,
        first_token_seconds=median(s for run in runs for s in run.first_token_seconds),
        accepted_length=mean(tokens),
        drafted_length=mean(sum(run.drafted for run in runs)),
        scheduled_length=mean(scheduled),
        acceptance=by_position(runs),
        waste=(scheduled - accepted) / scheduled if scheduled else None,
        draft_share=share(sum(run.draft_seconds for run in runs)),
        verify_share=share(sum(run.verify_seconds for run in runs)),
        host_share=share(sum(run.host_seconds for run in runs)),
        joules_per_token=sum(joules) / tokens if len(joules) == len(runs) and tokens else None,
        rules=rules,
    )


def typical_rate(repeats: Sequence[Sequence[Run]]) -> float:
    """Tokens per second with every group's time the median of its repeats.

    A hiccup in one run is thus outvoted by the same group's other runs.
    """
    groups = [[run for run in group if run] for group in zip_longest(*repeats)]
    tokens = sum(median(run.count for run in group) for group in groups)
    return float(tokens / max(1e-9, sum(median(run.seconds for run in group) for group in groups)))


def rate(runs: Sequence[Run]) -> float:
    """Tokens per second over several groups."""
    return sum(run.count for run in runs) / max(1e-9, sum(run.seconds for run in runs))


def by_position(runs: Sequence[Run]) -> tuple[float, ...]:
    """Of the tokens verified at each draft position, the share that was accepted."""
    width = max((len(run.reached) for run in runs), default=0)
    rates = []
    for k in range(width):
        reached = sum(run.reached[k] for run in runs if k < len(run.reached))
        survived = sum(run.survived[k] for run in runs if k < len(run.survived))
        if reached:
            rates.append(survived / reached)
    return tuple(rates)
