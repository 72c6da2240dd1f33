"""Which shapes are worth timing, the most telling first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHALLOW, DEEP = 128, 1024  # context lengths that are measured


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """One thing to time: a target step of ``size`` tokens a row, or a draft of ``size``.

    ``method`` is empty for a target step.
    """

    context: int
    rows: int
    method: str
    size: int


def grid(
    max_rows: int, blocks: dict[str, int], contexts: Sequence[int] = (SHALLOW, DEEP)
) -> list[list[Shape]]:
    """The shapes to measure in levels, the most telling first; none is named twice.

    ``blocks`` is each method's longest draft. The corners come first, then
    every width of a single row (the staircase of a chat), then more rows, then
    long contexts, then what lies between.
    """
    widest = max(blocks.values(), default=0) + 1
    base, *deeper = contexts
    widths = range(1, widest + 1)
    few = sorted({1, (widest + 1) // 2, widest})
    some_rows = [r for r in (2, 4, 8) if 1 < r < max_rows]
    other_rows = [r for r in (3, 6) if r < max_rows]

    def steps(context: int, rows: Sequence[int], sizes: Sequence[int]) -> list[Shape]:
        return [Shape(context, r, "", w) for r in rows for w in sizes]

    def drafts(rows: Sequence[int], *, corners: bool) -> list[Shape]:
        return [
            Shape(base, r, method, size)
            for r in rows
            for method, block in blocks.items()
            for size in (sorted({1, block}) if corners else range(1, block + 1))
        ]

    ends = sorted({1, max_rows})
    levels = [
        steps(base, ends, sorted({1, widest})) + drafts(ends, corners=True),
        steps(base, [1], few),
        steps(base, [1], widths[1::2]),
        steps(base, [1], widths),
        # The first drafted tokens are the steepest, and those that several rows may afford.
        steps(base, some_rows, sorted({min(n, widest) for n in (1, 2, 4, widest)}))
        + drafts(some_rows, corners=True),
        [s for c in deeper for s in steps(c, ends, sorted({1, widest}))],
        steps(base, [max_rows], widths),
        drafts([1], corners=False),
        steps(base, some_rows, widths),
        steps(base, other_rows, widths) + drafts(ends + some_rows, corners=False),
    ]
    named: set[Shape] = set()
    for level in levels:
        level[:] = [shape for shape in dict.fromkeys(level) if shape not in named]
        named.update(level)
    return levels
