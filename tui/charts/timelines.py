"""What changes from round to round: speed, acceptance, lengths, times, slowdown.

Each shows the newest rounds at the right, two a cell; ratios are of sums over
the last few rounds, so that a single one does not make the line jump.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from ..canvas import Canvas, nice_ceiling
from ..state import LiveState, Sample
from . import axes
from .axes import number, percent


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
    now, mean = number(state.tps_now), f"mean {number(state.tps_reply)}"
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


def acceptance(state: LiveState, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    rate = _rolling(_seen(state, width, 16), lambda s: (s.kept, s.verified), 16)
    axes.title(canvas, "acceptance", percent(state.acceptance))
    axes.axis(canvas, "100%", "0%")
    axes.lines(canvas, [(rate, "draft")], 1.0)
    return canvas


def cuts_over_time(state: LiveState, width: int, height: int) -> Canvas:
    """Where each draft was cut, and how much of it was accepted."""
    canvas = Canvas(width, height)
    samples = _seen(state, width, 4)
    last = samples[-1] if samples else None
    value = f"{last.scheduled:.1f} {last.accepted:.1f} of {state.block}" if last else "-"
    axes.title(canvas, "draft length", value, [("cut", "predicted"), ("kept", "draft")])
    top = float(state.block)
    axes.axis(canvas, f"{top:g}")
    axes.lines(
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
    axes.title(canvas, "tokens a round", number(state.per_round, 2))
    top = float(state.block + 1)
    axes.axis(canvas, f"{top:g}")
    axes.level(canvas, 1.0, top, "plain")
    axes.lines(canvas, [(rate, "measured")], top)
    return canvas


def step_time(state: LiveState, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    samples = _seen(state, width)
    real = [s.round_seconds * 1000 for s in samples]
    guess = [s.predicted_seconds * 1000 if s.predicted_seconds else None for s in samples]
    known = sorted(real + [g for g in guess if g is not None])
    top = nice_ceiling(known[int(0.98 * (len(known) - 1))] if known else 1.0)
    value = f"{real[-1]:.0f} of {number(guess[-1], 0)} ms" if samples else "-"
    axes.title(canvas, "round", value, [("measured", "measured"), ("predicted", "predicted")])
    axes.axis(canvas, f"{top:g}")
    axes.lines(canvas, [(guess, "predicted"), (real, "measured")], top)
    return canvas


def slowdown(state: LiveState, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    now = f"{len(state.active)} active {state.queued} queued"
    axes.title(canvas, "slowdown", f"×{state.load.slowdown_fast:.2f} · {now}")
    samples = _seen(state, width)
    top = nice_ceiling(max([2.0] + [s.slowdown for s in samples]))
    axes.axis(canvas, f"×{top:g}")
    axes.level(canvas, 1.0, top, "plain")
    axes.lines(canvas, [([s.slowdown for s in samples], "reject")], top)
    return canvas
