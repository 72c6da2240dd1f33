"""The results of a comparison as tables and charts: speed, acceptance, time, losslessness. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..charts import BarChart, Chart, LineChart, Series
from .results import Cell, CellName, Results
from .text_tables import DASH, number, percent, plural, spread, text_table

SPEED = ("tok/s", "range", "ratio", "range", "first s")
ROUNDS = ("len", "drafted", "verified", "waste", "draft", "verify", "host")


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
    for place, here in _by_place(cells).items():
        parts += ["", _heading(*place)]
        for domain in dict.fromkeys(c.name.domain for c in here):
            rows = [[*_speed(c), *_rounds(c)] for c in here if c.name.domain == domain]
            parts += ["", text_table((domain, *SPEED, *ROUNDS), rows)]
        if len({c.name.domain for c in here}) > 1:
            parts += ["", text_table(("all domains", *SPEED[:3], "worst"), _overall(results, here))]
    parts.append("")
    for table in (_positions(cells), *_rules(cells)):
        parts += [table, ""] if table else []
    parts += [*(line(verdict) for verdict in hindsight(results)), *results.notes]
    return "\n".join([*parts, *losslessness(results)])


@dataclass(frozen=True, slots=True)
class Hindsight:
    """A schedule in one cell against the method's best fixed length, and plain decoding.

    ``of_best`` and ``of_plain`` (None: not measured) are shares of their tokens/s, by medians
    over repeats.
    """

    name: CellName
    best: str
    of_best: float
    of_plain: float | None


def hindsight(results: Results) -> list[Hindsight]:
    """For every schedule that is not fixed, where its method also ran at fixed lengths."""
    rates = {cell.name: cell.tps for cell in results.cells()}
    found = []
    for name, tps in rates.items():
        method, _, schedule = name.system.partition(" ")
        fixed = {
            other.system: rate
            for other, rate in rates.items()
            if replace(other, system=name.system) == name
            and other.system.startswith(f"{method} fixed")
        }
        if not fixed or not schedule or schedule.startswith("fixed"):
            continue
        plain = rates.get(replace(name, system="none"))
        if plain is not None:  # verifying nothing is a fixed length too
            fixed["none"] = plain
        best = max(fixed, key=lambda system: fixed[system])
        found.append(Hindsight(name, best, tps / fixed[best], tps / plain if plain else None))
    return found


def line(verdict: Hindsight) -> str:
    name = verdict.name
    plain = "" if verdict.of_plain is None else f", {percent(verdict.of_plain)} of plain decoding"
    return (
        f"{name.system} on {name.domain}, {_heading(name.temperature, name.concurrency)}: "
        f"{percent(verdict.of_best)} of the best fixed length ({verdict.best}){plain}"
    )


def losslessness(results: Results) -> list[str]:
    """The verdict, and every fork with its margin."""
    if not results.compared:
        return ["lossless: nothing was compared"]
    ties = sum(fork.near_tie for fork in results.forks)
    wrong = len(results.forks) - ties
    compared = plural(results.compared, "reply", "replies")
    if not results.forks:
        lines = [f"lossless: yes, all of {compared} are the reference's own, token by token"]
    elif wrong:
        lines = [f"lossless: NO, {wrong} of {compared} left the reference where it was no tie"]
    else:
        lines = [f"lossless: yes but for near-ties, where {ties} of {compared} forked"]
    for fork in results.forks:
        kind = "near-tie" if fork.near_tie else "NOT a tie"
        lines.append(
            f"  {fork.system}, T {fork.temperature:g}, {fork.concurrency} at once: token "
            f"{fork.position + 1} of {fork.prompt!r}, top-2 margin {fork.margin:.2g} ({kind})"
        )
    return lines


def charts(results: Results) -> list[Chart]:
    """Tokens/s by domain for every place measured, and acceptance by position."""
    made: list[Chart] = []
    cells = results.cells()
    for place, here in _by_place(cells).items():
        by_name = {(c.name.domain, c.name.system): c for c in here}
        domains = tuple(dict.fromkeys(c.name.domain for c in here))
        systems = tuple(dict.fromkeys(c.name.system for c in here))
        grid = [[by_name.get((domain, system)) for system in systems] for domain in domains]
        made.append(
            BarChart(
                _heading(*place),
                "tokens/s",
                domains,
                systems,
                values=tuple(tuple(c.tps if c else None for c in row) for row in grid),
                spread=tuple(tuple(map(_whisker, row)) for row in grid),
            )
        )
    lines = tuple(
        Series(name, tuple((k + 1.0, a) for k, a in enumerate(acceptance)))
        for name, acceptance in _acceptance(cells).items()
    )
    if lines:
        made.append(
            LineChart("Acceptance by position", "draft position", "accepted if verified", lines)
        )
    return made


def note(results: Results) -> str:
    """The line below the charts: what was measured where."""
    about = results.about
    named = {"model": "", "device": "", "mlx": "mlx ", "started": ""}
    return ", ".join(f"{word}{about[k]}" for k, word in named.items() if k in about)


def _whisker(cell: Cell | None) -> tuple[float, float] | None:
    if cell is None or cell.tps_low is None or cell.tps_high is None:
        return None
    return cell.tps_low, cell.tps_high


def _heading(temperature: float, concurrency: int) -> str:
    kind = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return f"{kind}, {plural(concurrency, 'request')} at a time"


def _by_place(cells: Sequence[Cell]) -> dict[tuple[float, int], list[Cell]]:
    """The cells by temperature and concurrency, in this order."""
    places: dict[tuple[float, int], list[Cell]] = {}
    for cell in cells:
        places.setdefault((cell.name.temperature, cell.name.concurrency), []).append(cell)
    return dict(sorted(places.items()))


def _by_system(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    systems: dict[str, list[Cell]] = {}
    for cell in cells:
        systems.setdefault(cell.name.system, []).append(cell)
    return systems


def _speed(cell: Cell) -> list[str]:
    return [
        cell.name.system,
        number(cell.tps),
        spread(cell.tps_low, cell.tps_high),
        _times(cell.ratio),
        spread(cell.ratio_low, cell.ratio_high, 2),
        number(cell.first_token_seconds),
    ]


def _times(ratio: float | None) -> str:
    return DASH if ratio is None else f"{ratio:.2f}×"


def _rounds(cell: Cell) -> list[str]:
    # A draft that took no time of its own ran in one graph with the verification.
    alone = cell.draft_share != 0.0 or not cell.drafted_length
    return [
        number(cell.accepted_length),
        number(cell.drafted_length),
        number(cell.scheduled_length),
        percent(cell.waste),
        percent(cell.draft_share if alone else None),
        percent(cell.verify_share),
        percent(cell.host_share),
    ]


def _overall(results: Results, cells: Sequence[Cell]) -> list[list[str]]:
    """Every system over all domains, with its worst domain by ratio."""
    rows = []
    for mine in _by_system(cells).values():
        rated = [c for c in mine if c.ratio is not None]
        worst = min(rated, key=lambda c: c.ratio or 0.0, default=None)
        domain = f"{_times(worst.ratio)} {worst.name.domain}" if worst else DASH
        rows.append([*_speed(over_domains(results, mine))[:4], domain])
    return rows


def over_domains(results: Results, cells: Sequence[Cell]) -> Cell:
    """One system's cells of several domains as a single cell."""
    return results.cell([c.name for c in cells], domain="all")


def _acceptance(cells: Sequence[Cell]) -> dict[str, tuple[float, ...]]:
    """By system and domain at the first place measured."""
    first = next(iter(_by_place(cells).values()), [])
    return {f"{c.name.system}, {c.name.domain}": c.acceptance for c in first if c.acceptance}


def _positions(cells: Sequence[Cell]) -> str:
    found = _acceptance(cells)
    if not found:
        return ""
    width = max(map(len, found.values()))
    rows = [
        [name, *map(percent, rates), *[""] * (width - len(rates))] for name, rates in found.items()
    ]
    head = ("accepted, if verified, at position", *(str(k + 1) for k in range(width)))
    return text_table(head, rows)


def _rules(cells: Sequence[Cell]) -> list[str]:
    """Which rule decided how many rounds, where a policy has several."""
    lines = []
    for system, mine in _by_system(cells).items():
        rules: Counter[str] = Counter()
        for cell in mine:
            rules.update(cell.rules)
        if len(rules) > 1:
            parts = ", ".join(f"{rule} {times}" for rule, times in sorted(rules.items()))
            lines.append(f"rounds of {system} decided by: {parts}")
    return lines
