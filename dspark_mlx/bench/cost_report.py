"""A measured cost model as text tables and charts."""

from __future__ import annotations

from collections.abc import Mapping

from ..charts import Chart, LineChart, Series
from ..schedule.cost import CostModel
from .text_tables import number, plural, text_table


def text(cost: CostModel) -> str:
    """Milliseconds of target steps and drafts; ``*`` marks what was interpolated."""
    parts = []
    if cost.key is not None:
        parts += [
            f"model      {cost.key.model}",
            f"precision  {cost.key.quantisation}",
            f"device     {cost.key.device}",
            f"mlx        {cost.key.mlx}",
            "",
        ]
    for context, table in sorted(cost.step.items()):

        def step(rows: int, width: int, context: int = context) -> str:
            known = width in cost.step[context][rows]
            return _ms(cost.seconds(rows, width, context)) + ("" if known else "*")

        widths = _sizes(table)
        parts.append(f"target step, ms, {context} tokens of context")
        parts.append(
            text_table(
                _head(widths), [[str(r), *(step(r, w) for w in widths)] for r in sorted(table)]
            )
        )
        one = table.get(1, {})
        if 1 in one and len(one) > 1:
            ratios = ", ".join(f"{w}: {one[w] / one[1]:.2f}" for w in sorted(one) if w > 1)
            parts.append(f"one row, against a step of 1 token: {ratios}")
        parts.append("")
    for method, table in sorted(cost.draft.items()):
        sizes = _sizes(table)
        rows = [[str(r), *(_ms(table[r].get(n)) for n in sizes)] for r in sorted(table)]
        parts += [f"{method} draft, ms", text_table(_head(sizes), rows), ""]
    parts.append(f"host work of a round  {1e3 * cost.overhead:.2f} ms")
    parts.append(f"reading confidences before verifying  {1e3 * cost.sync_overhead:.2f} ms")
    parts.append(f"a plain round saves by being dispatched early  {1e3 * cost.overlap:.2f} ms")
    return "\n".join(parts)


def charts(cost: CostModel) -> list[Chart]:
    """Milliseconds over width, a line for each number of rows; one chart a context, and drafts."""
    made: list[Chart] = [
        LineChart(
            f"Target step, {context} tokens of context",
            "tokens a row, the anchor among them",
            "ms",
            _series(table),
        )
        for context, table in sorted(cost.step.items())
    ]
    drafts = tuple(
        line
        for method, table in sorted(cost.draft.items())
        for line in _series(table, f"{method}, ")
    )
    if drafts:
        made.append(LineChart("Draft", "tokens drafted a row", "ms", drafts))
    return made


def note(cost: CostModel) -> str:
    """The line below the charts: what was measured where."""
    return f"{cost.key.device}, mlx {cost.key.mlx}, {cost.key.model}" if cost.key else ""


def _series(table: Mapping[int, Mapping[int, float]], prefix: str = "") -> tuple[Series, ...]:
    return tuple(
        Series(
            f"{prefix}{plural(rows, 'row')}",
            tuple((float(n), 1e3 * seconds) for n, seconds in sorted(points.items())),
        )
        for rows, points in sorted(table.items())
    )


def _sizes(table: Mapping[int, Mapping[int, float]]) -> list[int]:
    return sorted({n for points in table.values() for n in points})


def _head(sizes: list[int]) -> list[str]:
    return ["rows", *(f"{n} tok" if n == sizes[0] else str(n) for n in sizes)]


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return number(None)
    return number(1e3 * seconds, 2 if seconds < 0.01 else 1)
