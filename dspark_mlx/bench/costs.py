"""A measured cost model as a text table and a picture."""

from __future__ import annotations

from ..schedule.cost import CostModel
from . import picture
from .tables import table


def text(cost: CostModel) -> str:
    """Milliseconds per target step and draft; ``*`` marks what was interpolated."""
    parts = []
    if cost.key is not None:
        parts += [
            f"model      {cost.key.model}",
            f"precision  {cost.key.quantisation}",
            f"device     {cost.key.device}",
            f"mlx        {cost.key.mlx}",
            "",
        ]
    for context in sorted(cost.step):
        rows = sorted(cost.step[context])
        widths = _sizes(cost.step[context])
        parts.append(f"target step, ms, {context} tokens of context")
        parts.append(
            table(
                ["rows", *(f"{w} tok" if w == widths[0] else str(w) for w in widths)],
                [
                    [str(r), *(_cell(cost.step[context][r], w, cost, context, r) for w in widths)]
                    for r in rows
                ],
            )
        )
        one = cost.step[context].get(1, {})
        if 1 in one and len(one) > 1:
            ratios = ", ".join(f"{w}: {one[w] / one[1]:.2f}" for w in sorted(one) if w > 1)
            parts.append(f"one row, against a step of 1 token: {ratios}")
        parts.append("")
    for method in sorted(cost.draft):
        sizes = _sizes(cost.draft[method])
        parts.append(f"{method} draft, ms")
        parts.append(
            table(
                ["rows", *(f"{n} tok" if n == sizes[0] else str(n) for n in sizes)],
                [
                    [str(r), *(_ms(cost.draft[method][r].get(n)) for n in sizes)]
                    for r in sorted(cost.draft[method])
                ],
            )
        )
        parts.append("")
    parts.append(f"a round besides that  {1e3 * cost.overhead:.2f} ms")
    parts.append(f"looking at confidences before verifying  {1e3 * cost.look:.2f} ms")
    parts.append(f"a plain round saves by being begun early  {1e3 * cost.overlap:.2f} ms")
    return "\n".join(parts)


def charts(cost: CostModel) -> list[picture.Chart]:
    """Step seconds over width, a line for each number of rows; and the drafts'."""
    made: list[picture.Chart] = []
    for context in sorted(cost.step):
        series = tuple(
            picture.Series(
                f"{rows} row{'s' if rows > 1 else ''}",
                tuple((float(w), 1e3 * s) for w, s in sorted(points.items())),
            )
            for rows, points in sorted(cost.step[context].items())
        )
        made.append(
            picture.Lines(
                f"Target step, {context} tokens of context",
                "tokens a row, the anchor among them",
                "ms",
                series,
            )
        )
    series = tuple(
        picture.Series(
            f"{method}, {rows} row{'s' if rows > 1 else ''}",
            tuple((float(n), 1e3 * s) for n, s in sorted(points.items())),
        )
        for method, table_ in sorted(cost.draft.items())
        for rows, points in sorted(table_.items())
    )
    if series:
        made.append(picture.Lines("Draft", "tokens drafted a row", "ms", series))
    return made


def svg(cost: CostModel) -> str:
    note = f"{cost.key.device}, mlx {cost.key.mlx}, {cost.key.model}" if cost.key else ""
    return picture.page(charts(cost), note)


def _sizes(by_rows: dict[int, dict[int, float]]) -> list[int]:
    return sorted({n for points in by_rows.values() for n in points})


def _cell(points: dict[int, float], width: int, cost: CostModel, context: int, rows: int) -> str:
    if width in points:
        return _ms(points[width])
    return f"{1e3 * cost.seconds(rows, width, context):.1f}*"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    ms = 1e3 * seconds
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}"
