"""What changes from round to round: speed, acceptance, lengths, times, slowdown.

Each chart shows the newest rounds at the right, two in each cell. Ratios are ratios of sums over
the last few rounds, so that a single round does not make the line jump.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from dspark_mlx.stats import EngineStats, RoundSample

from ..canvas import Canvas, nice_ceiling
from . import axes
from .axes import number, percent


def _seen(stats: EngineStats, width: int, before: int = 0) -> list[RoundSample]:
    """The rounds that a time line of ``width`` cells shows, and ``before`` rounds more."""
    wanted = 2 * max(0, width) + before
    skip = max(0, len(stats.samples) - wanted)
    return list(itertools.islice(stats.samples, skip, None))


def _rolling(
    samples: Sequence[RoundSample], value: Callable[[RoundSample], tuple[float, float]], span: int
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


def speed(stats: EngineStats, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    samples = _seen(stats, width, 8)
    rate = _rolling(samples, lambda s: (s.tokens, s.round_seconds), 8)
    baseline = stats.plain_tps
    highest = max([r for r in rate if r is not None] + [baseline or 0.0])
    top = nice_ceiling(highest)
    gain = f" ×{stats.speedup:.2f}" if stats.speedup else ""
    now, mean = number(stats.tps_now), f"mean {number(stats.tps_per_request)}"
    axes.title(
        canvas,
        "tokens/s",
        [f"{now} {mean}{gain}", f"{now}{gain}", now],
        [(f"╌ plain {number(baseline)}", "plain")],
    )
    axes.axis(canvas, f"{top:g}")
    axes.level(canvas, baseline, top, "plain")
    axes.lines(canvas, [(rate, "measured")], top)
    return canvas


def acceptance(stats: EngineStats, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    rate = _rolling(_seen(stats, width, 16), lambda s: (s.accepted, s.scheduled), 16)
    axes.title(canvas, "acceptance", percent(stats.recent_acceptance))
    axes.axis(canvas, "100%", "0%")
    axes.lines(canvas, [(rate, "draft")], 1.0)
    return canvas


def cuts_over_time(stats: EngineStats, width: int, height: int) -> Canvas:
    """Where each draft was cut, and how much of it was accepted."""
    canvas = Canvas(width, height)
    samples = _seen(stats, width, 4)
    last = samples[-1] if samples else None
    value = "-"
    if last:
        rows = max(1, last.rows)
        value = f"{last.scheduled / rows:.1f} {last.accepted / rows:.1f} of {stats.block}"
    axes.title(canvas, "draft length", value, [("cut", "predicted"), ("kept", "draft")])
    top = float(stats.block)
    axes.axis(canvas, f"{top:g}")
    axes.lines(
        canvas,
        [
            ([s.scheduled / max(1, s.rows) for s in samples], "predicted"),
            (_rolling(samples, lambda s: (s.accepted / max(1, s.rows), 1.0), 4), "draft"),
        ],
        top,
    )
    return canvas


def accepted_length(stats: EngineStats, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    rate = _rolling(_seen(stats, width, 8), lambda s: (s.tokens, float(s.rows)), 8)
    axes.title(canvas, "tokens a round", number(stats.recent_tokens_per_round, 2))
    top = float(stats.block + 1)
    axes.axis(canvas, f"{top:g}")
    axes.level(canvas, 1.0, top, "plain")
    axes.lines(canvas, [(rate, "measured")], top)
    return canvas


def step_time(stats: EngineStats, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    samples = _seen(stats, width)
    real = [s.round_seconds * 1000 for s in samples]
    guess = [s.predicted_seconds * 1000 if s.predicted_seconds else None for s in samples]
    known = sorted(real + [g for g in guess if g is not None])
    top = nice_ceiling(known[int(0.98 * (len(known) - 1))] if known else 1.0)
    value = f"{real[-1]:.0f} of {number(guess[-1], 0)} ms" if samples else "-"
    axes.title(canvas, "round", value, [("measured", "measured"), ("predicted", "predicted")])
    axes.axis(canvas, f"{top:g}")
    axes.lines(canvas, [(guess, "predicted"), (real, "measured")], top)
    return canvas


def slowdown(stats: EngineStats, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    now = f"{len(stats.active)} active {stats.queued} queued"
    axes.title(canvas, "slowdown", f"×{stats.load.slowdown_fast:.2f} · {now}")
    samples = _seen(stats, width)
    top = nice_ceiling(max([2.0] + [s.slowdown for s in samples]))
    axes.axis(canvas, f"×{top:g}")
    axes.level(canvas, 1.0, top, "plain")
    axes.lines(canvas, [([s.slowdown for s in samples], "reject")], top)
    return canvas
