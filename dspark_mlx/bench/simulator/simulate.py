"""Serve replies with a policy on a cost table: a whole benchmark in milliseconds.

The policy sees exactly what the engine would show it: views, drafts,
confidences, outcomes and times. The world's prices may differ from those the
policy believes (``world``), drift (``slowdown``) and jitter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...request import Cuts
from ...schedule.cost import CostModel
from ...schedule.policy import Outcome, Policy, RowView
from .reply_trace import ReplyTrace

Slowdown = Callable[[int, int], float]  # (round, widest) -> factor on that round's step


@dataclass(slots=True)
class Result:
    """Totals of a run, and per round the widest length, the rule and the prediction."""

    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    scheduled: int = 0
    accepted: int = 0
    widths: list[int] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    predicted: list[float | None] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)

    @property
    def tps(self) -> float:
        return self.tokens / self.seconds


@dataclass(slots=True)
class _Row:
    name: str
    reply: ReplyTrace
    position: int = 0

    @property
    def remaining(self) -> int:
        return len(self.reply.accepts) - self.position


def simulate(
    policy: Policy,
    scripts: Sequence[ReplyTrace],
    world: CostModel,
    *,
    concurrency: int = 1,
    schedule_invariant: bool = True,
    calibrated: bool = True,
    cuts: Cuts | None = None,
    method: str = "dspark",
    slowdown: Slowdown | None = None,
    jitter: float = 0.0,
    seed: int = 0,
    drain: bool = True,
) -> Result:
    """Serve every script to its end, ``concurrency`` at a time, in the order given.

    Without ``drain`` the run ends when a reply does and none waits to follow,
    so that all of it has the full concurrency.
    ``jitter`` is the deviation of the logarithm of each round's time.
    """
    rng = np.random.default_rng(seed)
    waiting = [_Row(f"{i}:{s.domain}", s) for i, s in enumerate(scripts)][::-1]
    active: list[_Row] = []
    result = Result()
    cuts = cuts or Cuts()
    while waiting or active:
        while waiting and len(active) < concurrency:
            active.append(waiting.pop())
        if not drain and len(active) < concurrency:
            break
        views = tuple(
            RowView(
                row.name, method, row.reply.block, row.remaining, row.position, schedule_invariant,
                calibrated, cuts,
            )
            for row in active
        )  # fmt: skip
        plan = policy.plan(views)
        drafted = tuple(min(w, v.block) for w, v in zip(plan.widths, views, strict=True))
        confidence = tuple(
            tuple(row.reply.confidence[row.position, :n].tolist())
            for row, n in zip(active, drafted, strict=True)
        )
        reads = plan.needs_confidence and any(drafted)
        schedule = policy.schedule(views, drafted, confidence if reads else None)
        accepted = tuple(
            min(n, row.reply.accepts[row.position])
            for row, n in zip(active, schedule.lengths, strict=True)
        )
        committed = tuple(
            min(a + 1, row.remaining) for row, a in zip(active, accepted, strict=True)
        )
        widest, most = max(schedule.lengths), max(drafted)
        count = len(active)
        drafting = sum(1 for n in drafted if n)
        context = max(v.context for v in views)
        if any(drafted):
            step = world.seconds(count, widest + 1, context) + world.overhead
        else:
            step = world.plain(count, context)
        if slowdown is not None:
            step *= slowdown(len(result.widths), widest)
        draft = float(world.drafts(method, drafting, most)[most]) + world.sync_overhead * reads
        shake = float(np.exp(jitter * rng.normal())) if jitter else 1.0
        seconds = (step + draft) * shake
        for row, n in zip(active, committed, strict=True):
            row.position += n
        active = [row for row in active if row.remaining > 0]
        result.tokens += sum(committed)
        result.seconds += seconds
        result.drafted += sum(drafted)
        result.scheduled += sum(schedule.lengths)
        result.accepted += sum(accepted)
        result.widths.append(widest)
        result.rules.append(schedule.policy or policy.name)
        result.predicted.append(schedule.predicted_seconds)
        result.measured.append(seconds)
        policy.observe(
            Outcome(
                views, drafted, schedule.lengths, accepted, committed, confidence,
                draft * shake if reads else 0.0, step * shake, seconds,
            )
        )  # fmt: skip
    return result


def fixed_length(
    length: int,
    scripts: Sequence[ReplyTrace],
    world: CostModel,
    concurrency: int = 1,
    *,
    drain: bool = True,
) -> Result:
    """What ``simulate`` gives for ``Fixed(length)`` without cuts or drift, only faster."""
    waiting = [(script.accepts, script.block) for script in scripts][::-1]
    active: list[list[int]] = []  # position, end, which reply, most to draft
    replies: list[tuple[int, ...]] = []
    result = Result()
    while waiting or active:
        while waiting and len(active) < concurrency:
            accepts, block = waiting.pop()
            active.append([0, len(accepts), len(replies), min(length, block)])
            replies.append(accepts)
        if not drain and len(active) < concurrency:
            break
        widest = drafting = 0
        context = max(row[0] for row in active)
        for row in active:
            position, end, reply, most = row
            drafted = min(most, end - position - 1)
            accepted = min(drafted, replies[reply][position])
            row[0] = min(position + accepted + 1, end)
            widest, drafting = max(widest, drafted), drafting + (drafted > 0)
            result.tokens += row[0] - position
            result.drafted += drafted
            result.scheduled += drafted
            result.accepted += accepted
        step = world.seconds(len(active), widest + 1, context) + world.overhead
        if not length:
            step = world.plain(len(active), context)
        seconds = step + float(world.drafts("dspark", drafting, widest)[widest])
        result.seconds += seconds
        result.measured.append(seconds)
        result.widths.append(widest)
        active = [row for row in active if row[0] < row[1]]
    return result


def in_hindsight(
    scripts: Sequence[ReplyTrace], world: CostModel, concurrency: int = 1, *, drain: bool = True
) -> dict[int, Result]:
    """Every fixed length from 0 (plain decoding) to the block, each over the same scripts."""
    block = max(script.block for script in scripts)
    return {n: fixed_length(n, scripts, world, concurrency, drain=drain) for n in range(block + 1)}
