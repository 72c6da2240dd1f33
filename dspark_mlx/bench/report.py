"""A benchmark's results in words: tables by domain, acceptance, time, losslessness. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import picture
from .result import Cell, CellName, Results, summarise
from .tables import number, percent, plural, spread, table, without_blanks

SPEED = ("", "tok/s", "range", "ratio", "range", "first s")
ROUNDS = ("", "len", "drafted", "verified", "waste", "draft", "verify", "host")


def text(results: Results) -> str:
    """Everything worth reading, the verdict on losslessness last."""
    about = results.about
    parts = [
        f"{about.get('model', 'model')}, {about.get('device', '')}, mlx {about.get('mlx', '')}, "
        f"{about.get('dtype', '')}",
        f"{plural(about.get('prompts', 0), 'prompt')}, up to {about.get('tokens')} tokens each, "
        f"{plural(about.get('repeats', 1), 'repeat')}; load average "
        f"{about.get('load_average_before')} before, {about.get('load_average_after')} after",
        f"ratio: against {results.baseline} generating on the same weights, same prompts",
        *(["seconds: of this process's processor time"] if about.get("clock") == "cpu" else []),
    ]
    cells = results.cells()
    for temperature, concurrency in _places(cells):
        here = [
            c
            for c in cells
            if (c.name.temperature, c.name.concurrency) == (temperature, concurrency)
        ]
        parts += ["", _heading(temperature, concurrency), *_domains(results, here)]
    parts += ["", *_positions(cells), *_rules(cells)]
    parts += [*(line(v) for v in hindsight(results)), *results.notes, *losslessness(results)]
    return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a schedule fared in one cell against the method's best fixed length, and plain decoding.

    Shares are of tokens/s, by medians over repeats.
    """

    name: CellName
    best: str
    of_best: float
    of_plain: float | None


def hindsight(results: Results) -> list[Verdict]:
    """For every schedule that is not fixed itself, where its method also ran at fixed lengths."""
    rates = {cell.name: cell.tps for cell in results.cells()}
    found = []
    for name, tps in rates.items():
        method, _, schedule = name.side.partition(" ")
        fixed = {
            other.side: rate
            for other, rate in rates.items()
            if replace(other, side=name.side) == name and other.side.startswith(f"{method} fixed")
        }
        if not fixed or not schedule or schedule.startswith("fixed"):
            continue
        plain = rates.get(replace(name, side="none"))
        if plain is not None:  # verifying nothing is a fixed length too
            fixed["none"] = plain
        best = max(fixed, key=lambda side: fixed[side])
        found.append(Verdict(name, best, tps / fixed[best], tps / plain if plain else None))
    return found


def line(verdict: Verdict) -> str:
    name = verdict.name
    plain = "" if verdict.of_plain is None else f", {percent(verdict.of_plain)} of plain decoding"
    return (
        f"{name.side} on {name.domain}, {_heading(name.temperature, name.concurrency)}: "
        f"{percent(verdict.of_best)} of the best fixed length ({verdict.best}){plain}"
    )


def losslessness(results: Results) -> list[str]:
    """The verdict, and every fork with its margin."""
    if not results.compared:
        return ["lossless: nothing was compared"]
    ties = sum(fork.near_tie for fork in results.forks)
    bad = len(results.forks) - ties
    compared = plural(results.compared, "reply", "replies")
    if not results.forks:
        lines = [f"lossless: yes, all of {compared} are the reference's own, token by token"]
    elif bad:
        lines = [f"lossless: NO, {bad} of {compared} left the reference where it was no tie"]
    else:
        lines = [f"lossless: yes but for near-ties, where {ties} of {compared} forked"]
    for fork in results.forks:
        kind = "near-tie" if fork.near_tie else "NOT a tie"
        lines.append(
            f"  {fork.side}, T {fork.temperature:g}, {fork.concurrency} at once: token "
            f"{fork.position + 1} of {fork.prompt!r}, top-2 margin {fork.margin:.2g} ({kind})"
        )
    return lines


def charts(results: Results) -> list[picture.Chart]:
    """Speed by domain for every place measured, and acceptance by position."""
    made: list[picture.Chart] = []
    cells = results.cells()
    for temperature, concurrency in _places(cells):
        here = {
            (c.name.side, c.name.domain): c
            for c in cells
            if (c.name.temperature, c.name.concurrency) == (temperature, concurrency)
        }
        sides = list(dict.fromkeys(side for side, _ in here))
        domains = list(dict.fromkeys(domain for _, domain in here))
        grid = [[here.get((side, domain)) for side in sides] for domain in domains]
        made.append(
            picture.Bars(
                _heading(temperature, concurrency),
                "tokens/s",
                tuple(domains),
                tuple(sides),
                tuple(tuple(c.tps if c else None for c in row) for row in grid),
                tuple(tuple(_whisker(c) for c in row) for row in grid),
            )
        )
    lines = tuple(
        picture.Series(side, tuple((k + 1.0, a) for k, a in enumerate(acceptance)))
        for side, acceptance in _acceptance(cells).items()
    )
    if lines:
        made.append(
            picture.Lines("Acceptance by position", "draft position", "accepted if verified", lines)
        )
    return made


def _whisker(cell: Cell | None) -> tuple[float, float] | None:
    if cell is None or cell.tps_low is None or cell.tps_high is None:
        return None
    return cell.tps_low, cell.tps_high


def note(results: Results) -> str:
    about = results.about
    named = {"model": "", "device": "", "mlx": "mlx ", "started": ""}
    return ", ".join(f"{word}{about[k]}" for k, word in named.items() if k in about)


def _heading(temperature: float, concurrency: int) -> str:
    kind = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return f"{kind}, {plural(concurrency, 'request')} at a time"


def _places(cells: Sequence[Cell]) -> list[tuple[float, int]]:
    return sorted({(c.name.temperature, c.name.concurrency) for c in cells})


def _domains(results: Results, cells: Sequence[Cell]) -> list[str]:
    parts: list[str] = []
    for domain in dict.fromkeys(c.name.domain for c in cells):
        here = [c for c in cells if c.name.domain == domain]
        head = (domain, *SPEED[1:], *ROUNDS[1:])
        rows = [[*_speed(c), *_rounds(c)] for c in here]
        parts += ["", table(*without_blanks(head, rows))]
    if len({c.name.domain for c in cells}) > 1:
        rows = _overall(results, cells)
        parts += ["", table(*without_blanks(("all domains", *SPEED[1:4], "worst"), rows))]
    joules = [c for c in cells if c.joules_per_token is not None]
    if joules:
        rows = [[f"{c.name.domain}, {c.name.side}", number(c.joules_per_token)] for c in joules]
        parts += ["", table(("", "joules a token"), rows)]
    return parts


def _speed(cell: Cell) -> list[str]:
    return [
        cell.name.side,
        number(cell.tps),
        spread(cell.tps_low, cell.tps_high),
        "–" if cell.ratio is None else f"{cell.ratio:.2f}×",
        spread(cell.ratio_low, cell.ratio_high, 2),
        number(cell.first_token_seconds),
    ]


def _rounds(cell: Cell) -> list[str]:
    shares = [cell.draft_share, cell.verify_share, cell.host_share]
    if cell.draft_share == 0.0 and cell.drafted_length:
        shares[0] = None  # in one graph with the verification
    return [
        number(cell.accepted_length),
        number(cell.drafted_length),
        number(cell.scheduled_length),
        percent(cell.waste),
        *map(percent, shares),
    ]


def _overall(results: Results, cells: Sequence[Cell]) -> list[list[str]]:
    """Every side over all domains, with its worst domain by ratio."""
    rows = []
    for side in dict.fromkeys(c.name.side for c in cells):
        mine = [c for c in cells if c.name.side == side]
        whole = over_domains(results, mine)
        rated = [c for c in mine if c.ratio is not None]
        worst = min(rated, key=lambda c: c.ratio or 0.0, default=None)
        rows.append(
            [*_speed(whole)[:4], f"{worst.ratio:.2f}× {worst.name.domain}" if worst else "–"]
        )
    return rows


def over_domains(results: Results, cells: Sequence[Cell]) -> Cell:
    """One side's cells of several domains as a single cell."""
    names = [c.name for c in cells]
    base = [CellName(results.baseline, n.domain, n.temperature, n.concurrency) for n in names]
    first = names[0]
    merged = CellName(first.side, "all", first.temperature, first.concurrency)
    have_base = all(n in results.runs for n in base)
    return summarise(merged, _merge(results, names), _merge(results, base) if have_base else None)


def _merge(results: Results, names: Sequence[CellName]) -> list[list[Any]]:
    repeats = max(len(results.runs[n]) for n in names)
    return [
        [run for n in names if k < len(results.runs[n]) for run in results.runs[n][k]]
        for k in range(repeats)
    ]


def _acceptance(cells: Sequence[Cell]) -> dict[str, tuple[float, ...]]:
    """By side and domain at the first place measured."""
    if not cells:
        return {}
    place = (cells[0].name.temperature, cells[0].name.concurrency)
    return {
        f"{c.name.side}, {c.name.domain}": c.acceptance
        for c in cells
        if c.acceptance and (c.name.temperature, c.name.concurrency) == place
    }


def _positions(cells: Sequence[Cell]) -> list[str]:
    found = _acceptance(cells)
    if not found:
        return []
    width = max(map(len, found.values()))
    rows = [
        [name, *(percent(a[k]) if k < len(a) else "" for k in range(width))]
        for name, a in found.items()
    ]
    head = ("accepted, if verified, at position", *(str(k + 1) for k in range(width)))
    return [table(head, rows), ""]


def _rules(cells: Sequence[Cell]) -> list[str]:
    """Which rule decided how many rounds, where a policy has several."""
    lines = []
    for side in dict.fromkeys(c.name.side for c in cells):
        total: dict[str, int] = {}
        for cell in cells:
            if cell.name.side == side:
                for rule, times in cell.rules.items():
                    total[rule] = total.get(rule, 0) + times
        if len(total) > 1:
            parts = ", ".join(f"{rule} {times}" for rule, times in sorted(total.items()))
            lines.append(f"rounds of {side} decided by: {parts}")
    return [*lines, ""] if lines else []
