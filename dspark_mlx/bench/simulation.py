"""``--simulate``: policies on cost tables and recorded or synthetic replies, against hindsight.

A cell is one table, one kind of reply and one concurrency. Its yardsticks are
the best fixed length chosen afterwards for that cell, and plain decoding; over
all cells, the single fixed length that does best in all of them. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

from ..charts import BarChart, Chart
from ..errors import UsageError
from ..schedule import make_policy
from ..schedule.cost import CostModel
from ..trace import read_trace
from .simulator.reply_trace import DOMAINS, ReplyTrace, from_trace, synthetic
from .simulator.simulate import in_hindsight, simulate
from .simulator.tables import tables
from .text_tables import number, percent, text_table
from .workload import parse_schedule

BLOCK, TOKENS, REPLIES = 7, 200, 8  # of a synthetic reply
SYNTHETIC = (*DOMAINS, "mixed")


@dataclass(frozen=True, slots=True)
class SimCell:
    """Simulated tokens/s: of the schedule, of plain decoding, and of each fixed length.

    ``length`` is the mean scheduled length of the widest row, ``waste`` the
    share of scheduled tokens that were not accepted, None where none were.
    """

    table: str
    replies: str
    concurrency: int
    schedule: str
    tps: float
    plain: float
    fixed: dict[int, float]
    length: float
    waste: float | None

    @property
    def best(self) -> int:
        """The best length in hindsight; 0 is plain decoding."""
        return max(self.fixed, key=lambda length: self.fixed[length])

    @property
    def of_best(self) -> float:
        return self.tps / self.fixed[self.best]

    @property
    def of_plain(self) -> float:
        return self.tps / self.plain


def costs(spec: str) -> dict[str, CostModel]:
    """``spec`` as cost tables by name: a file, a built-in table, or ``all`` built-in ones."""
    known = tables()
    if spec == "all":
        return known
    if spec in known:
        return {spec: known[spec]}
    try:
        return {Path(spec).stem: CostModel.from_json(Path(spec).read_text("utf-8"))}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the cost table {spec}: {error}",
            f"give a file made by dspark profile --json, or {', '.join(known)} or all",
        ) from error


def replies(spec: str, seed: int = 0) -> dict[str, list[ReplyTrace]]:
    """``spec`` as replies by name: a trace, a synthetic domain, or ``all`` synthetic ones."""
    names = SYNTHETIC if spec == "all" else (spec,)
    if all(name in SYNTHETIC for name in names):
        return {
            name: [synthetic(name, TOKENS, BLOCK, seed + i) for i in range(REPLIES)]
            for name in names
        }
    if not Path(spec).is_file():
        raise UsageError(
            f"cannot read the trace {spec}: no such file",
            "record one with dspark generate --schedule fixed --trace FILE, or give "
            f"{', '.join(SYNTHETIC)} or all",
        )
    return {Path(spec).stem: from_trace(read_trace(spec), seed)}


def run(
    worlds: dict[str, CostModel],
    texts: dict[str, list[ReplyTrace]],
    schedules: Sequence[str],
    concurrency: Sequence[int],
    *,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[SimCell]:
    """Every schedule in every cell; each policy starts knowing the table and nothing else.

    ``schedules`` are named as in ``workload.variants``. Raises UsageError for one that is not.
    """
    if len(set(schedules)) < len(schedules):
        raise UsageError("a schedule is named twice")
    named = {spec: parse_schedule(spec) for spec in schedules}
    cells: list[SimCell] = []
    places = [(w, t, c) for w in worlds for t in texts for c in concurrency]
    for done, (world, text, count) in enumerate(places):
        progress(done, len(places), f"{world}, {text}, {count} at a time")
        cost, scripts = worlds[world], texts[text]
        fixed = {n: r.tps for n, r in in_hindsight(scripts, cost, count).items()}
        for spec, (name, options) in named.items():
            policy = make_policy(name, cost=cost, **options)
            made = simulate(policy, scripts, cost, concurrency=count)
            waste = 1.0 - made.accepted / made.scheduled if made.scheduled else None
            cells.append(
                SimCell(
                    world, text, count, spec, made.tps, fixed[0], fixed, mean(made.widths), waste
                )
            )
    progress(len(places), len(places), "")
    return cells


def best_single(cells: Sequence[SimCell]) -> tuple[int, float]:
    """The fixed length with the best mean share of each cell's own best, and that share."""
    lengths = set.intersection(*(set(cell.fixed) for cell in cells))
    score = {
        n: geometric_mean(cell.fixed[n] / cell.fixed[cell.best] for cell in cells) for n in lengths
    }
    best = max(score, key=lambda n: score[n])
    return best, score[best]


def text(cells: Sequence[SimCell]) -> str:
    head = (
        "table",
        "replies",
        "at a time",
        "schedule",
        "tok/s",
        "verified",
        "waste",
        "best fixed",
        "of best",
        "of plain",
    )
    rows = [
        [
            cell.table,
            cell.replies,
            str(cell.concurrency),
            cell.schedule,
            number(cell.tps, 1),
            number(cell.length),
            percent(cell.waste),
            f"{cell.best}: {cell.fixed[cell.best]:.1f}",
            percent(cell.of_best),
            percent(cell.of_plain),
        ]
        for cell in cells
    ]
    parts = [text_table(head, rows), ""]
    for schedule in dict.fromkeys(cell.schedule for cell in cells):
        mine = [cell for cell in cells if cell.schedule == schedule]
        low = min(mine, key=lambda cell: cell.of_best)
        plain = min(mine, key=lambda cell: cell.of_plain)
        length, share = best_single(mine)
        average = geometric_mean(cell.of_best for cell in mine)
        parts.append(
            f"{schedule}: {percent(average)} of the best fixed length of each cell on average, "
            f"at worst {percent(low.of_best)} ({_place(low)}); "
            f"of plain decoding at worst {percent(plain.of_plain)} ({_place(plain)}); "
            f"the best single length, {length}, reaches {percent(share)} on average"
        )
    return "\n".join(parts)


def charts(cells: Sequence[SimCell]) -> list[Chart]:
    """For every table, tokens/s as a share of the best fixed length in hindsight."""
    made: list[Chart] = []
    schedules = tuple(dict.fromkeys(cell.schedule for cell in cells))
    for name in dict.fromkeys(cell.table for cell in cells):
        mine = [cell for cell in cells if cell.table == name]
        groups = list(dict.fromkeys((cell.replies, cell.concurrency) for cell in mine))
        share = {(c.replies, c.concurrency, c.schedule): c.of_best for c in mine}
        plain = {(c.replies, c.concurrency): c.plain / c.fixed[c.best] for c in mine}
        made.append(
            BarChart(
                f"{name}: share of the best fixed length in hindsight",
                "share",
                tuple(f"{replies} ×{count}" for replies, count in groups),
                (*schedules, "plain"),
                tuple(
                    (*(share.get((*group, s)) for s in schedules), plain[group]) for group in groups
                ),
            )
        )
    return made


def to_json(cells: Sequence[SimCell]) -> list[dict[str, Any]]:
    return [
        {**asdict(c), "best": c.best, "of_best": c.of_best, "of_plain": c.of_plain} for c in cells
    ]


def _place(cell: SimCell) -> str:
    return f"{cell.table}, {cell.replies}, {cell.concurrency} at a time"
