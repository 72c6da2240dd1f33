"""What the scheduler measures and decides.

The cost of a step, the speed expected of each length, the calibration of the confidences, where
drafts were cut and how often each position was accepted.
"""

from __future__ import annotations

from dspark_mlx.stats import EngineStats

from ..canvas import Canvas, nice_ceiling
from . import axes
from .axes import number, percent


def cost_curve(stats: EngineStats, width: int, height: int) -> Canvas:
    """Measured seconds of a target step over its width, one line for each number of rows."""
    canvas = Canvas(width, height)
    table = stats.cost
    if table is None or not table.widths:
        axes.title(canvas, "cost of a step", "not measured")
        return canvas
    top = nice_ceiling(max(max(row) for row in table.step_seconds) * 1000)
    styles = ("measured", "predicted", "target", "good")
    legend = [("rows", "axis")] + [(f"━{rows}", styles[i % 4]) for i, rows in enumerate(table.rows)]

    axes.title(canvas, "cost of a step", "ms", legend)
    axes.axis(canvas, f"{top:g}")
    low, high = table.widths[0], max(table.widths[-1], table.widths[0] + 1)
    for i, row in enumerate(table.step_seconds):
        points = [
            ((w - low) / (high - low), s * 1000 / top)
            for w, s in zip(table.widths, row, strict=False)
        ]
        axes.curve(canvas, points, styles[i % 4])
    axes.x_labels(canvas, low, high)
    return canvas


def decision(stats: EngineStats, width: int, height: int) -> Canvas:
    """The scheduler's expected tokens/s over the length, the chosen point marked."""
    canvas = Canvas(width, height)
    row = stats.last_draft
    if row is None or not row.curve:
        axes.title(canvas, "decision", "no curve yet")
        return canvas
    top = nice_ceiling(max(row.curve))
    chosen = min(row.scheduled, len(row.curve) - 1)
    axes.title(canvas, "decision", f"verify {chosen}: {row.curve[chosen]:.1f}/s expected")
    axes.axis(canvas, f"{top:g}")
    last = max(1, len(row.curve) - 1)
    points = [(i / last, value / top) for i, value in enumerate(row.curve)]
    axes.curve(canvas, points, "predicted")
    axes.mark(canvas, points[chosen], "◆", "target")
    axes.x_labels(canvas, 0, last)
    return canvas


def cut_histogram(stats: EngineStats, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    total = sum(stats.totals.cuts)
    mean = sum(n * c for n, c in enumerate(stats.totals.cuts)) / total if total else None
    axes.title(canvas, "cuts", f"mean {number(mean)}")
    counts = stats.totals.cuts + [0] * (stats.block + 1 - len(stats.totals.cuts))
    highest = max(counts) / total if total else 1.0
    top = 1.0 if highest > 0.5 else 0.5
    axes.axis(canvas, percent(top), "")
    axes.bars(canvas, [c / total / top if total else None for c in counts], 0, "predicted")
    return canvas


def by_position(stats: EngineStats, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    shares = stats.totals.acceptance_by_position()
    shares += [None] * (stats.block - len(shares))
    axes.title(canvas, "kept at position", "")
    axes.axis(canvas, "100%", "")
    axes.bars(canvas, shares, 1, "draft")
    return canvas


def reliability(stats: EngineStats, width: int, height: int) -> Canvas:
    """The share of accepted tokens over the drafter's confidence; the diagonal is calibrated."""
    canvas = Canvas(width, height)
    error = stats.calibration_error()
    last = stats.last_draft
    calibrated = last is not None and (last.calibrated or last.copied)
    axes.title(
        canvas, "confidence", f"off by {percent(error)}" + ("" if calibrated else " uncalibrated")
    )
    axes.axis(canvas, "100%", "0%")
    axes.curve(canvas, [(0.0, 0.0), (1.0, 1.0)], "plain")
    points = [
        (b.confidence / b.count, b.accepted / b.count) for b in stats.reliability if b.count >= 5
    ]
    axes.curve(canvas, points, "draft")
    for point in points:
        axes.mark(canvas, point, "●", "draft")
    axes.x_labels(canvas, 0, 100)
    return canvas
