"""Which steps are worth timing, and their prices from noisy samples. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

SHALLOW, DEEP = 128, 1024  # context lengths that are measured: a short chat, and a long one

# Rounds of polishing in ``prices``. The same four profiles of smollm2-135m on two CPU cores agree
# on the staircase of one row within 4.5 % (median) after 3 rounds as after 12, and 6.2 % without.
POLISH_ROUNDS = 3


@dataclass(frozen=True, slots=True, order=True)
class StepKind:
    """One thing to time, for ``rows`` rows with ``context`` cached positions.

    A target step of ``size`` tokens a row, the anchor included, where ``method`` is empty;
    otherwise a draft of ``size`` tokens a row by that method.
    """

    context: int
    rows: int
    method: str
    size: int


def grid(
    max_rows: int, blocks: Mapping[str, int], contexts: Sequence[int] = (SHALLOW, DEEP)
) -> list[list[StepKind]]:
    """The kinds to measure in levels, the most telling first; none is named twice.

    ``blocks`` is each method's longest draft. The corners come first, then every width of a
    single row (what a chat pays), then more rows, then long contexts, then what lies between.
    """
    widest = max(blocks.values(), default=0) + 1
    base, *deeper = contexts
    widths = range(1, widest + 1)
    few = sorted({1, (widest + 1) // 2, widest})
    some_rows = [r for r in (2, 4, 8) if 1 < r < max_rows]
    other_rows = [r for r in (3, 6) if r < max_rows]
    ends = sorted({1, max_rows})

    def steps(context: int, rows: Sequence[int], sizes: Sequence[int]) -> list[StepKind]:
        return [StepKind(context, r, "", w) for r in rows for w in sizes]

    def drafts(rows: Sequence[int], *, corners: bool) -> list[StepKind]:
        return [
            StepKind(base, r, method, size)
            for r in rows
            for method, block in blocks.items()
            for size in (sorted({1, block}) if corners else range(1, block + 1))
        ]

    levels = [
        steps(base, ends, sorted({1, widest})) + drafts(ends, corners=True),
        steps(base, [1], few),
        steps(base, [1], widths[1::2]),
        steps(base, [1], widths),
        # The first drafted tokens are the steepest, and those that several rows may afford.
        steps(base, some_rows, sorted({min(n, widest) for n in (1, 2, 4, widest)}))
        + drafts(some_rows, corners=True),
        [kind for c in deeper for kind in steps(c, ends, sorted({1, widest}))],
        steps(base, [max_rows], widths),
        drafts([1], corners=False),
        steps(base, some_rows, widths),
        steps(base, other_rows, widths) + drafts(ends + some_rows, corners=False),
    ]
    named: set[StepKind] = set()
    for level in levels:
        level[:] = [kind for kind in dict.fromkeys(level) if kind not in named]
        named.update(level)
    return levels


def typical(samples: Sequence[float]) -> float:
    """Median of the faster half: other programs on the machine only ever add time."""
    return median(sorted(samples)[: (len(samples) + 1) // 2])


def prices(samples: Mapping[StepKind, Sequence[float]]) -> dict[StepKind, float]:
    """Seconds of each kind, from one sample of it in every pass.

    The clock speed of a machine wanders between passes by more than neighbouring widths
    differ. So a sample is taken as price x speed of its pass; both are found by turns as
    medians (median polish), and the speed that is typical of the passes becomes that of all.
    A kind that was added later has fewer samples, those of the last passes.
    """
    latest_first = {kind: xs[::-1] for kind, xs in samples.items()}
    speed = [1.0] * max(map(len, samples.values()), default=0)

    def price(xs: Sequence[float]) -> float:
        return median(x / s for x, s in zip(xs, speed, strict=False))

    for _ in range(POLISH_ROUNDS):
        now = [(xs, price(xs)) for xs in latest_first.values()]
        speed = [median(xs[i] / p for xs, p in now if i < len(xs)) for i in range(len(speed))]
    return {kind: typical(speed) * price(xs) for kind, xs in latest_first.items()}


def extra_seconds(rounds: Sequence[tuple[bool, float]]) -> float:
    """What marked rounds take longer than unmarked ones: the median over neighbours, at least 0.

    On two CPU cores the standard deviation of this over 18 rounds of 190 ms is 4 ms; that of
    the difference of two medians is 10 ms.
    """
    found = [
        (seconds - before) if marked else (before - seconds)
        for (was_marked, before), (marked, seconds) in pairwise(rounds)
        if marked != was_marked
    ]
    return max(0.0, median(found)) if found else 0.0
