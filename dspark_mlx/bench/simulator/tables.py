"""Cost tables to simulate on: some ideal, some published, one measured here.

Each prices a target step of n tokens in all (rows x width): ``M4_PRO`` is the
published ratio of quantised matmuls on an M4 Pro (4 tokens 1.47, 8 tokens 2.69
times one); ``CPU_2_CORES`` is SmolLM2-135M in float32 on a 2-core Linux machine
with OpenBLAS (105, 121, 129, 143, 150, 155, 160 ms for 1 to 7 tokens, a draft
16 ms). The other three are ideal shapes around a 25 ms step.
"""

from __future__ import annotations

from collections.abc import Callable

from ...schedule.cost import CostModel, Points

MAX_ROWS = 8
MAX_WIDTH = 17
STEP = 0.025


def by_tokens(
    price: Callable[[int], float], draft: float, *, overhead: float = 0.0005, sync: float = 0.0
) -> CostModel:
    """``price(n)`` seconds for n tokens in all; ``draft`` seconds for one row's block of 8.

    Most of a draft does not depend on rows and block: a quarter more for eight
    times the rows, and the same for twice the block.
    """
    rows = range(1, MAX_ROWS + 1)
    step = {r: {w: price(r * w) for w in range(1, MAX_WIDTH + 1)} for r in rows}
    drafts = {
        r: {b: draft * (0.72 + 0.22 * b / 8 + 0.06 * r * b / 8) for b in range(1, MAX_WIDTH)}
        for r in rows
    }
    return CostModel({0: step}, {"dspark": drafts}, overhead=overhead, sync_overhead=sync)


def through(points: Points) -> Callable[[int], float]:
    """Piecewise linear through measured points, extrapolated as ``CostModel`` does."""
    model = CostModel({0: {1: points}})
    return lambda n: model.seconds(1, n)


def _cliff(n: int) -> float:
    """Flat to 4 tokens, then a jump, then flat for every 8 more."""
    return STEP * (1.0 if n <= 4 else 1.8 + 0.6 * ((n - 5) // 8))


CPU_2_CORES: Points = dict(enumerate((0.105, 0.121, 0.129, 0.143, 0.150, 0.155, 0.160), start=1))
M4_PRO: Points = {1: STEP, 4: 1.47 * STEP, 8: 2.69 * STEP}


def tables() -> dict[str, CostModel]:
    """All of them by name, newly made."""
    return {
        "flat": by_tokens(lambda n: STEP, 0.15 * STEP, sync=0.02 * STEP),
        "linear": by_tokens(lambda n: STEP * n, 0.15 * STEP, sync=0.02 * STEP),
        "cliff-after-4": by_tokens(_cliff, 0.15 * STEP, sync=0.02 * STEP),
        "m4-pro-quantised": by_tokens(through(M4_PRO), 0.15 * STEP, sync=0.02 * STEP),
        "cpu-2-cores": by_tokens(through(CPU_2_CORES), 0.016, overhead=0.001, sync=0.001),
    }
