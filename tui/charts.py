"""The charts: each a function of the live state and a size in cells.

Pure. Every time line shows the same rounds (two a cell, the newest at the
right), shares run from 0 to 100 %, lengths from 0 to the block, so that charts
can be compared with each other and over time. The first row is the title.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from .canvas import Canvas, nice_ceiling
from .state import LiveState, RequestState, Sample
from .text import count, seconds, size

AXIS = 5  # cells left of the plot
Draw = Callable[[LiveState, int, int], Canvas]
Series = tuple[Sequence[float | None], str]


def number(value: float | None, digits: int = 1, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _title(
    canvas: Canvas,
    name: str,
    value: str | Sequence[str] = "",
    legend: Sequence[tuple[str, str]] = (),
) -> None:
    """The title row. Of several values, longest first, the first that fits is shown."""
    x = canvas.text(0, 0, name, "title")
    values = [value] if isinstance(value, str) else value
    fitting = next((text for text in values if x + len(text) + 2 <= canvas.width), "")
    canvas.right(0, fitting, "value")
    for text, style in legend:
        if x + len(text) + 2 + len(fitting) >= canvas.width:
            break
        x = canvas.text(x + 1, 0, text, style)


def _axis(canvas: Canvas, top: str, bottom: str = "0") -> None:
    last = canvas.height - 1
    canvas.right(1, top, "axis", AXIS - 1)
    if last > 1:
        canvas.right(last, bottom, "axis", AXIS - 1)
    for y in range(1, canvas.height):
        canvas.text(AXIS - 1, y, "┤" if y in (1, last) else "│", "axis")


def _lines(canvas: Canvas, series: Sequence[Series], top: float, low: float = 0.0) -> None:
    """Plot right-aligned series, one dot column a round, below the title."""
    left, dots_high = 2 * AXIS, 4 * (canvas.height - 1)
    room = 2 * (canvas.width - AXIS)
    if room <= 0 or dots_high <= 0 or top <= low:
        return
    for values, style in series:
        shown = list(values)[-room:]
        start = left + room - len(shown)
        before: tuple[int, int] | None = None
        for i, value in enumerate(shown):
            if value is None:
                before = None
                continue
            share = max(0.0, min(1.0, (value - low) / (top - low)))
            at = (start + i, 4 + round((dots_high - 1) * (1 - share)))
            if before:
                canvas.segment(*before, *at, style)
            else:
                canvas.dot(*at, style)
            before = at


def _level(canvas: Canvas, value: float | None, top: float, style: str) -> None:
    """A dashed line across the plot at ``value``."""
    if value is None or not 0 <= value <= top:
        return
    dots_high = 4 * (canvas.height - 1)
    y = 4 + round((dots_high - 1) * (1 - value / top))
    for x in range(2 * AXIS, 2 * canvas.width):
        if x % 6 < 3:
            canvas.dot(x, y, style)


def _seen(state: LiveState, width: int, before: int = 0) -> list[Sample]:
    """The rounds that a time line of ``width`` cells shows, and ``before`` more that count."""
    wanted = 2 * max(0, width) + before
    skip = max(0, len(state.samples) - wanted)
    return list(itertools.islice(state.samples, skip, None))


def _rolling(
    samples: Sequence[Sample], value: Callable[[Sample], tuple[float, float]], span: int
) -> list[float | None]:
    """Ratio of sums over the last ``span`` rounds, for each round."""
    out: list[float | None] = []
    pairs = [value(sample) for sample in samples]
    upper = lower = 0.0
    for i, (a, b) in enumerate(pairs):
        upper, lower = upper + a, lower + b
        if i >= span:
            upper, lower = upper - pairs[i - span][0], lower - pairs[i - span][1]
        out.append(upper / lower if lower > 1e-12 else None)
    return out


def speed(state: LiveState, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    samples = _seen(state, width, 8)
    rate = _rolling(samples, lambda s: (s.tokens, s.round_seconds), 8)
    baseline = state.baseline
    highest = max([r for r in rate if r is not None] + [baseline or 0.0])
    top = nice_ceiling(highest)
    gain = f" ×{state.speedup:.2f}" if state.speedup else ""
    now, mean = number(state.tps_now), f"mean {number(state.tps_mean)}"
    _title(
        canvas,
        "tokens/s",
        [f"{now} {mean}{gain}", f"{now}{gain}", now],
        [(f"╌ plain {number(baseline)}", "plain")],
    )
    _axis(canvas, f"{top:g}")
    _level(canvas, baseline, top, "plain")
    _lines(canvas, [(rate, "measured")], top)
    return canvas


def acceptance(state: LiveState, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    rate = _rolling(_seen(state, width, 16), lambda s: (s.kept, s.verified), 16)
    _title(canvas, "acceptance", percent(state.acceptance))
    _axis(canvas, "100%", "0%")
    _lines(canvas, [(rate, "draft")], 1.0)
    return canvas


def cuts_over_time(state: LiveState, width: int, height: int) -> Canvas:
    """Where each draft was cut, and how much of it was accepted."""
    canvas = Canvas(width, height)
    samples = _seen(state, width, 4)
    last = samples[-1] if samples else None
    value = f"{last.scheduled:.1f} {last.accepted:.1f} of {state.block}" if last else "-"
    _title(canvas, "draft length", value, [("cut", "predicted"), ("kept", "draft")])
    top = float(state.block)
    _axis(canvas, f"{top:g}")
    _lines(
        canvas,
        [
            ([s.scheduled for s in samples], "predicted"),
            (_rolling(samples, lambda s: (s.accepted, 1.0), 4), "draft"),
        ],
        top,
    )
    return canvas


def accepted_length(state: LiveState, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    rate = _rolling(_seen(state, width, 8), lambda s: (s.tokens, float(s.rows)), 8)
    _title(canvas, "tokens a round", number(state.per_round, 2))
    top = float(state.block + 1)
    _axis(canvas, f"{top:g}")
    _level(canvas, 1.0, top, "plain")
    _lines(canvas, [(rate, "measured")], top)
    return canvas


def _bars(canvas: Canvas, shares: Sequence[float | None], first: int, style: str) -> None:
    """Columns with their numbers below and, where there is room, their values inside the plot."""
    room, high = canvas.width - AXIS, canvas.height - 2
    if not shares or room <= 0 or high <= 0:
        return
    step = max(1, room // len(shares))
    wide = max(1, step - 1) if step > 1 else 1
    for i, share in enumerate(shares):
        x = AXIS + i * step
        if x + wide > canvas.width:
            break
        if share is not None:
            canvas.column(x, 1, high, share, style, wide)
        if step > 1 or i % 2 == 0:
            canvas.text(x, canvas.height - 1, str(first + i)[-wide:], "axis")


def cut_histogram(state: LiveState, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    total = sum(state.cuts)
    mean = sum(n * c for n, c in enumerate(state.cuts)) / total if total else None
    _title(canvas, "cuts", f"mean {number(mean)}")
    counts = state.cuts + [0] * (state.block + 1 - len(state.cuts))
    highest = max(counts) / total if total else 1.0
    top = 1.0 if highest > 0.5 else 0.5
    _axis(canvas, percent(top), "")
    _bars(canvas, [c / total / top if total else None for c in counts], 0, "predicted")
    return canvas


def by_position(state: LiveState, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    shares = state.by_position()
    shares += [None] * (state.block - len(shares))
    _title(canvas, "kept at position", "")
    _axis(canvas, "100%", "")
    _bars(canvas, shares, 1, "draft")
    return canvas


def step_time(state: LiveState, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    samples = _seen(state, width)
    real = [s.round_seconds * 1000 for s in samples]
    guess = [s.predicted_seconds * 1000 if s.predicted_seconds else None for s in samples]
    known = sorted(real + [g for g in guess if g is not None])
    top = nice_ceiling(known[int(0.98 * (len(known) - 1))] if known else 1.0)
    value = f"{real[-1]:.0f} of {number(guess[-1], 0)} ms" if samples else "-"
    _title(canvas, "round", value, [("measured", "measured"), ("predicted", "predicted")])
    _axis(canvas, f"{top:g}")
    _lines(canvas, [(guess, "predicted"), (real, "measured")], top)
    return canvas


def slowdown(state: LiveState, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    load = state.load
    _title(
        canvas, "slowdown", f"×{load.slowdown_fast:.2f} · {load.active} active {load.queued} queued"
    )
    samples = _seen(state, width)
    top = nice_ceiling(max([2.0] + [s.slowdown for s in samples]))
    _axis(canvas, f"×{top:g}")
    _level(canvas, 1.0, top, "plain")
    _lines(canvas, [([s.slowdown for s in samples], "reject")], top)
    return canvas


def shares(state: LiveState, width: int, height: int) -> Canvas:
    """Draft, verify and host share of the time: a bar and its legend."""
    canvas = Canvas(width, height)
    draft, verify, host = state.shares()
    parts = [f"draft {percent(draft)}", f"verify {percent(verify)}", f"host {percent(host)}"]
    _title(canvas, "time", [" ".join(parts), " ".join(parts[:2])])
    canvas.stacked(
        0, 1, width, [(draft, "▓", "draft"), (verify, "█", "target"), (host, "░", "axis")]
    )
    return canvas


def memory(state: LiveState, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    held = state.memory
    weights = held.weights or (state.loaded.weight_bytes if state.loaded else 0)
    peak = max(held.peak, weights + held.kv, 1)
    kv = f"KV {size(held.kv)}"
    parts = [kv, f"weights {size(weights)}", f"peak {size(held.peak)}"]
    _title(canvas, "memory", [" ".join(parts), " ".join([kv, parts[2]]), kv])
    canvas.stacked(
        0,
        1,
        width,
        [
            (weights / peak, "█", "target"),
            (held.kv / peak, "▓", "draft"),
            (1 - (weights + held.kv) / peak, "░", "axis"),
        ],
    )
    return canvas


def context(state: LiveState, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    limit = state.loaded.context_limit if state.loaded else 0
    used = max((r.context for r in (state.active or list(state.requests.values())[-1:])), default=0)
    _title(canvas, "context", f"{used:,} of {limit:,}" if limit else f"{used:,}")
    canvas.text(0, 1, "░" * width, "axis")
    canvas.bar(0, 1, width, used / limit if limit else 0.0, "measured")
    return canvas


def cost_curve(state: LiveState, width: int, height: int) -> Canvas:
    """Measured seconds of a target step over its width, one line for each number of rows."""
    canvas = Canvas(width, height)
    table = state.cost
    if table is None or not table.widths:
        _title(canvas, "cost of a step", "not measured")
        return canvas
    top = nice_ceiling(max(max(row) for row in table.step_seconds) * 1000)
    styles = ("measured", "predicted", "target", "good")
    legend = [("rows", "axis")] + [(f"━{rows}", styles[i % 4]) for i, rows in enumerate(table.rows)]

    _title(canvas, "cost of a step", "ms", legend)
    _axis(canvas, f"{top:g}")
    low, high = table.widths[0], max(table.widths[-1], table.widths[0] + 1)
    for i, row in enumerate(table.step_seconds):
        points = [
            ((w - low) / (high - low), s * 1000 / top)
            for w, s in zip(table.widths, row, strict=False)
        ]
        _curve(canvas, points, styles[i % 4])
    _x_labels(canvas, low, high)
    return canvas


def decision(state: LiveState, width: int, height: int) -> Canvas:
    """The scheduler's expected tokens/s over the length, the chosen point marked."""
    canvas = Canvas(width, height)
    row = state.last_row
    if row is None or not row.curve:
        _title(canvas, "decision", "no curve yet")
        return canvas
    top = nice_ceiling(max(row.curve))
    chosen = min(row.scheduled, len(row.curve) - 1)
    _title(canvas, "decision", f"verify {chosen}: {row.curve[chosen]:.1f}/s expected")
    _axis(canvas, f"{top:g}")
    last = max(1, len(row.curve) - 1)
    points = [(i / last, value / top) for i, value in enumerate(row.curve)]
    _curve(canvas, points, "predicted")
    _mark(canvas, points[chosen], "◆", "target")
    _x_labels(canvas, 0, last)
    return canvas


def reliability(state: LiveState, width: int, height: int) -> Canvas:
    """How often the drafter was right over how sure it was; the diagonal is honest."""
    canvas = Canvas(width, height)
    error = state.calibration_error()
    calibrated = state.last_row.calibrated if state.last_row else False
    _title(
        canvas, "confidence", f"off by {percent(error)}" + ("" if calibrated else " uncalibrated")
    )
    _axis(canvas, "100%", "0%")
    _curve(canvas, [(0.0, 0.0), (1.0, 1.0)], "plain")
    points = [(b.confidence / b.count, b.kept / b.count) for b in state.reliability if b.count >= 5]
    _curve(canvas, points, "draft")
    for point in points:
        _mark(canvas, point, "●", "draft")
    _x_labels(canvas, 0, 100)
    return canvas


def _plot(canvas: Canvas, point: tuple[float, float]) -> tuple[int, int]:
    """The dot of a point given in shares of the plot, whose last row is the x axis."""
    wide, high = 2 * (canvas.width - AXIS) - 2, 4 * (canvas.height - 2) - 1
    x = 2 * AXIS + round(point[0] * wide)
    return x, 4 + round((1 - max(0.0, min(1.0, point[1]))) * high)


def _curve(canvas: Canvas, points: Sequence[tuple[float, float]], style: str) -> None:
    dots = [_plot(canvas, point) for point in points]
    for before, at in itertools.pairwise(dots):
        canvas.segment(*before, *at, style)


def _mark(canvas: Canvas, point: tuple[float, float], char: str, style: str) -> None:
    x, y = _plot(canvas, point)
    canvas.text(x // 2, y // 4, char, style)


def _x_labels(canvas: Canvas, low: int, high: int) -> None:
    y = canvas.height - 1
    canvas.text(0, y, " " * canvas.width)
    canvas.text(AXIS, y, str(low), "axis")
    canvas.right(y, str(high), "axis")


def requests_table(state: LiveState, width: int, height: int) -> Canvas:
    """All requests, the active ones first: lengths and speeds."""
    canvas = Canvas(width, height)
    columns: list[tuple[str, int, Callable[[RequestState], str]]] = [
        ("request", 12, lambda r: r.id),
        ("state", 9, lambda r: r.status.value),
        ("method", 8, lambda r: r.method or "-"),
        ("context", 8, lambda r: count(r.context)),
        ("tokens", 7, lambda r: count(r.tokens)),
        ("now/s", 7, lambda r: number(r.tps_now) if r.active else "-"),
        ("mean/s", 7, lambda r: number(r.tps_mean)),
        ("accept", 7, lambda r: percent(r.acceptance)),
        ("a round", 8, lambda r: number(r.per_round, 2)),
        ("cut", 4, lambda r: str(r.last.scheduled) if r.last else "-"),
    ]
    rows = sorted(state.requests.values(), key=lambda r: r.active, reverse=True)
    active = len(state.active)
    _title(
        canvas,
        "requests",
        f"{active} active, {state.load.queued} queued, policy {state.policy or '-'}",
    )
    x = 0
    for name, wide, value in columns:
        if x + wide > width:
            break
        left = name in ("request", "state", "method")
        for y, text in enumerate([name, *(value(r) for r in rows[: height - 2])], 1):
            style = "axis" if y == 1 else ("text" if rows[y - 2].active else "dim")
            text = text[: wide - 1]
            canvas.text(x if left else x + wide - 1 - len(text), y, text, style)
        x += wide
    return canvas


def status_line(state: LiveState, width: int, height: int = 1) -> Canvas:
    """Everything that matters in one row, most important first; what has no room is left out."""
    canvas = Canvas(width, 1)
    parts: list[tuple[str, str]] = []
    if state.samples:
        parts.append((f"{number(state.tps_now)} tok/s", "value"))
        if state.speedup:
            parts.append(
                (
                    f"×{state.speedup:.2f} over {number(state.baseline)} plain",
                    "good" if state.speedup >= 1 else "reject",
                )
            )
        parts.append((f"mean {number(state.tps_mean)}", "dim"))
        parts.append((f"{percent(state.acceptance)} accepted", "draft"))
        parts.append((f"{number(state.per_round, 2)} a round", "dim"))
        busy = [r for r in state.active]
        if busy:
            limit = (
                f"/{count(state.loaded.context_limit)}"
                if state.loaded and state.loaded.context_limit
                else ""
            )
            parts.append((f"ctx {count(max(r.context for r in busy))}{limit}", "dim"))
        if state.load.slowdown_fast > 1.15:
            parts.append((f"device ×{state.load.slowdown_fast:.1f} slower", "reject"))
        if len(busy) > 1:
            parts.append((f"{len(busy)} replies", "target"))
    elif state.loaded:
        parts.append((f"{state.loaded.method}: {state.loaded.reason}", "dim"))
        if state.baseline:
            parts.append((f"plain {number(state.baseline)} tok/s", "dim"))
    x = 1
    for text, style in parts:
        if x + len(text) > width - 1:
            break
        x = canvas.text(x, 0, text, style)
        x = canvas.text(x, 0, "  ", "")
    return canvas


def duration(value: float | None) -> str:
    return "-" if value is None else seconds(value)
